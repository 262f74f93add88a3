"""What the page of all figures says beside them, in each language."""

WORDS = {
    # The page of all figures.
    "page": ("See and change every mechanism", "每个机制都能看、都能动"),
    "page note": (
        "Everything here was computed by the package's own code when the page was written. In the figures of blocks "
        "and of attention blue is queries and attention, orange keys and FFN, green values and embedding; other "
        "figures say what their colours mean.",
        "页面上的数字都由本项目自己的代码在生成页面时算出。在 block 和 attention 的图里，蓝色是 query 和 attention，"
        "橙色是 key 和 FFN，绿色是 value 和 embedding；其他图各自注明颜色的含义。",
    ),
    "section journey": ("One token's journey", "一个 token 的旅程"),
    "about journey": (
        "A tiny model, trained on the spot, predicts what comes next: follow one vector through it.",
        "现场训练的小模型预测下一个 token：跟着一个向量走完全程。",
    ),
    "section families": ("One block, many families", "一个 block，很多家族"),
    "about families": (
        "Norm, positions, attention, FFN: numbers mark which of the four two models do differently.",
        "Norm、位置、attention、FFN：编号标出两个模型在这四处中哪些做法不同。",
    ),
    "section attention": ("Attention, step by step", "Attention：一步一步算"),
    "about attention": (
        "Pick a query; then without the mask. Then change a token, and see what a cache may keep.",
        "选一个 query；再看没有 mask 时。然后改一个 token，看 cache 里哪些还能用。",
    ),
    "section decoding": ("Why a KV cache", "为什么需要 KV cache"),
    "about decoding": ("Work of each step, by the formula and as compiled.", "每一步的工作量：公式与编译后的程序。"),
    "section caches": ("MHA, GQA, MQA, MLA", "MHA、GQA、MQA、MLA"),
    "about caches": (
        "What is kept of a text. MQA keeps least, but all its heads read the same keys and values; MLA keeps a "
        "little more, and each head still has keys and values of its own, made of the latent. In the experiments of "
        "DeepSeek-V2 (arXiv:2405.04434) MQA and GQA were worse than MHA, and MLA was better.",
        "一段文本要缓存多少。MQA 缓存最少，但所有 head 读同样的 K/V；MLA 略多一点，每个 head 仍有自己的 K/V，由 "
        "latent 算出。DeepSeek-V2 的实验（arXiv:2405.04434）中，MQA 和 GQA 不如 MHA，MLA 更好。",
    ),
    "section windows": ("Windows and sinks", "窗口与 sink"),
    "about windows": ("A window further each layer; sinks stay.", "每多一层多一个窗口；sink 始终保留。"),
    "section rope": ("RoPE", "RoPE"),
    "about rope": ("Positions turn vectors; only distance counts.", "位置让向量旋转，起作用的只有距离。"),
    "section experts": ("Mixture of experts", "MoE"),
    "about experts": ("Grids of true size; small models for the load.", "格子是真实数量；负载来自小模型。"),
    "section tiles": ("FlashAttention", "FlashAttention"),
    "about tiles": ("Tiles, the online softmax, and bytes.", "分块、online softmax 与字节数。"),
    "section sharding": ("Sharding", "分片"),
    "about sharding": (
        "Which device holds which part, what it sends, and what it has to hold.",
        "哪个设备持有哪一部分，发送什么，要放下什么。",
    ),
    # Its controls.
    "contents": ("contents", "目录"),
    "change theme": ("Light / dark", "浅色 / 深色"),
    "play": ("Play", "播放"),
    "pause": ("Pause", "暂停"),
    "choose from and to": ("from → to", "从 → 到"),
    "choose mask": ("mask", "mask"),
    "choose model": ("model", "模型"),
    "choose cached text": ("attention", "attention"),
    "choose query heads": ("query heads", "query head 数"),
    "choose precision": ("precision", "精度"),
    "choose layers": ("layers", "各层"),
    "choose sinks": ("sinks", "sink 数"),
    "choose distance": ("distance Δ", "距离 Δ"),
    "choose array": ("array", "数组"),
    "choose mesh": ("mesh", "设备网格"),
    "as published": ("as published", "与公开模型相同"),
    "a window of 3": ("window of 3", "窗口 3"),
    "a window": ("window of 12", "窗口 12"),
    "a window and sinks": ("window of 12, 4 sinks", "窗口 12，4 个 sink"),
    "two documents": ("two documents", "两篇文档"),
    "windows of 4": ("windows of 4", "窗口均为 4"),
    "5 windows : 1 full": ("5 windows of 3 : 1 full", "5 层窗口 3 : 1 层全局"),
    "in turns": ("windows of 4 and full, in turns", "窗口 4 与全局交替"),
    "windows and 2 sinks": ("windows of 4, 2 sinks", "窗口 4，2 个 sink"),
}
