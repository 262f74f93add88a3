"""What the page of all figures says beside them, in each language."""

WORDS = {
    # The page of all figures.
    "page": ("See and change every mechanism", "每个机制都能看、都能动"),
    "page note": (
        "Everything here was computed by the package's own code when the page was written. Blue is queries and "
        "attention, orange keys, FFN and experts, green values and embedding.",
        "页面上的数字都由本项目自己的代码在生成页面时算出。蓝色是 query 和 attention，橙色是 key、FFN 和 expert，"
        "绿色是 value 和 embedding。",
    ),
    "section journey": ("One token's journey", "一个 token 的旅程"),
    "about journey": (
        "A tiny model, trained on the spot, predicts what comes next: follow one vector through it.",
        "现场训练的小模型预测下一个 token：跟着一个向量走完全程。",
    ),
    "section families": ("One block, many families", "一个 block，很多家族"),
    "about families": (
        "Norm, positions, attention, FFN: a dot marks where two differ.",
        "Norm、位置、attention、FFN：圆点标出不同之处。",
    ),
    "section attention": ("Attention, step by step", "Attention：一步一步算"),
    "about attention": ("Pick a query; then without the mask.", "选一个 query；再看没有 mask 时。"),
    "section decoding": ("Why a KV cache", "为什么需要 KV cache"),
    "about decoding": ("Work of each step, by the formula and as compiled.", "每一步的工作量：公式与编译后的程序。"),
    "section caches": ("MHA → GQA → MQA → MLA", "MHA → GQA → MQA → MLA"),
    "about caches": ("What is kept of a text; the slider sets its length.", "一段文本要缓存多少；滑块设定长度。"),
    "section windows": ("Windows and sinks", "窗口与 sink"),
    "about windows": ("A window further each layer; sinks stay.", "每多一层多一个窗口；sink 始终保留。"),
    "section rope": ("RoPE", "RoPE"),
    "about rope": ("Positions turn vectors; only distance counts.", "位置让向量旋转，起作用的只有距离。"),
    "section experts": ("Mixture of experts", "MoE"),
    "about experts": ("Grids of true size; small models for the load.", "格子是真实数量；负载来自小模型。"),
    "section tiles": ("FlashAttention", "FlashAttention"),
    "about tiles": ("Tiles, the online softmax, and bytes.", "分块、online softmax 与字节数。"),
    "section sharding": ("Sharding", "分片"),
    "about sharding": ("Which device holds which part.", "哪个设备持有哪一部分。"),
}
