"""What figures of mechanisms say: positions, windows, tiles, generation, experts, and a token's journey."""

WORDS = {
    # RoPE.
    "rope rotation": ("RoPE: position as rotation", "RoPE：把位置变成旋转"),
    "moved together": (
        "the key stays behind the query, at Δ = {distance}: both turn, their score does not change",
        "key 始终在 query 之前，Δ = {distance}：两者一起旋转，分数不变",
    ),
    "pair": ("pair {pair}: a turn in {wave:.3g} tokens", "第 {pair} 对：{wave:.3g} token 转一圈"),
    "same score": ("their score, wherever they are", "两者的分数，与绝对位置无关"),
    "query position": ("position of the query", "query 的位置"),
    "rope scores": ("RoPE: score over distance, {dim} features", "RoPE：分数随距离的变化，{dim} 维"),
    "distance": ("distance Δ of query and key", "query 与 key 的距离 Δ"),
    "score share": ("score, 1 at Δ = 0", "分数（Δ = 0 时为 1）"),
    "rope wavelengths": ("RoPE: wavelengths under each scaling", "RoPE：各种缩放下的波长"),
    "scaled to": (
        "{dim} features, θ = {theta:,.0f}, context × {factor:g}",
        "{dim} 维，θ = {theta:,.0f}，上下文 × {factor:g}",
    ),
    "wavelength": ("wavelength of each pair", "每一对的波长"),
    "stretched": ("stretched by", "拉长的倍数"),
    "pair number": ("pair of features", "第几对"),
    "trained length": ("trained on {length:,} tokens", "训练长度 {length:,}"),
    "scaling plain": ("unscaled", "不缩放"),
    "scaling larger base": ("larger base (NTK), θ = {theta:,.0f}", "调大 base（NTK），θ = {theta:,.0f}"),
    "scaling linear": ("linear ÷ {factor:g}", "线性 ÷ {factor:g}"),
    "scaling piecewise": ("Llama 3.1's piecewise", "Llama 3.1 分段缩放"),
    "scaling yarn": ("YaRN", "YaRN"),
    # Windows and sinks.
    "receptive field": ("How far each token sees, measured by gradient", "每个 token 能看多远（用梯度测量）"),
    "windows are": ("windows: {windows}", "各层窗口：{windows}"),
    "reach measured": ("measured: {count} tokens", "实测：{count} 个 token"),
    "reach formula": ("formula: 1 + Σ (w − 1) = {reach}", "公式：1 + Σ (w − 1) = {reach}"),
    "reach sinks": (", and the sinks: {reach}", "，加上 sink：{reach}"),
    "reach all": ("a layer sees all: everything behind", "有全局层：左侧全部"),
    "layers stacked": ("layers stacked", "堆叠层数"),
    "not reached": ("out of reach", "不可达"),
    "reached": ("reached through other tokens", "经其他 token 到达"),
    "seen directly": ("seen by one layer", "一层内直接可见"),
    "token": ("token", "token"),
    "all": ("all", "全部"),
    "layer": ("layer", "层"),
    "layer patterns": ("Windows and full attention, layer by layer", "窗口层与全局层的排列"),
    "windowed": ("window", "窗口"),
    "full": ("full", "全局"),
    "ring cache": ("A ring of {window} slots; sinks before it: {sinks}", "{window} 个环形槽位；前面的 sink：{sinks}"),
    "slot": ("slot", "槽位"),
    "token written": ("after token", "写入第几个 token 之后"),
    "kept": ("in the window", "窗口内"),
    "sink": ("sink, never overwritten", "sink，从不覆盖"),
    "written": ("just written", "刚写入"),
    # Tiles.
    "tiles": ("Tiles that a flash attention kernel visits", "FlashAttention 访问的分块"),
    "tiles visited": (
        "{visited} of {tiles} tiles visited ({share:.0%}), numbered in their order; {partial} of them need the mask "
        "inside; × is skipped",
        "{tiles} 块中访问 {visited} 块（{share:.0%}），按访问顺序编号；其中 {partial} 块内部仍需 mask；× 整块跳过",
    ),
    "online softmax": ("Online softmax: one row, tile by tile", "Online softmax：逐块处理一行"),
    "tile": ("tile", "分块"),
    "scores of the row": ("scores of the row; dashed: the maximum so far", "这一行的分数；虚线：目前的最大值"),
    "output so far": ("output: acc / l", "输出：acc / l"),
    "so far": ("tile by tile, so far", "逐块，目前"),
    "in the end": ("ordinary softmax over all keys", "对全部 key 的普通 softmax"),
    "online state": (
        "max m = {top:.3f} · sum l = Σ exp(score − m) = {total:.3f} · acc = Σ exp(score − m) · v · {faded}; largest "
        "difference from the ordinary softmax: {error:.2g}",
        "最大值 m = {top:.3f} · 和 l = Σ exp(分数 − m) = {total:.3f} · acc = Σ exp(分数 − m) · v · {faded}；与普通 "
        "softmax 的最大差：{error:.2g}",
    ),
    "first tile": ("first tile: nothing before it to rescale", "第一块：之前没有需要缩放的结果"),
    "faded": (
        "l and acc of the tiles before were multiplied by exp(m_old − m_new) = {fade:.3f}",
        "之前的 l 和 acc 乘以 exp(m_old − m_new) = {fade:.3f}",
    ),
    "score": ("score", "分数"),
    "traffic": ("Bytes that one head moves", "一个 head 的显存读写量"),
    "traffic ratio": (
        "between HBM and the chip's own memory. Standard: the scores S = q·k and the weights P = softmax(S) are "
        "written and read whole. At {length:,} tokens tiles move {like:.1f} times fewer for the same {flops:.3g} "
        "GFLOP; a causal mask lets them skip tiles too: {ratio:.1f} times fewer, {skipped:.3g} GFLOP. Head dim {dim}, "
        "tiles of {block}, bfloat16",
        "HBM 与芯片内部存储之间的读写。标准：完整写出并读回分数 S = q·k 和权重 P = softmax(S)。{length:,} token 时，"
        "同样 {flops:.3g} GFLOP，分块的读写量是 1/{like:.1f}；causal mask 下还能跳过分块：1/{ratio:.1f}，"
        "{skipped:.3g} GFLOP。head 维度 {dim}，分块 {block}，bfloat16",
    ),
    "traffic over": ("over the length, both axes log", "随长度变化（双对数轴）"),
    "traffic parts": ("of {length:,} tokens: which arrays", "{length:,} token：各是哪些数组"),
    "standard": ("standard", "标准"),
    "unskipped": ("tiled", "分块"),
    "tiled": ("tiled, hidden tiles skipped", "分块，跳过被挡住的块"),
    "scores whole": ("{name}, whole", "完整的 {name}"),
    # Generation.
    "decoding": ("Why generation needs a KV cache", "为什么解码离不开 KV cache"),
    "work formula": (
        "one head of one layer: without a cache t keys, t values, t(t + 1)/2 scores a step; with one 1, 1 and t",
        "单层单个 head 每步：没有 cache 要算 t 个 key、t 个 value、t(t + 1)/2 个分数；有 cache 只需 1、1、t",
    ),
    "this step": ("this step", "当前这一步"),
    "all steps": ("keys, values and scores of all steps so far", "累计的 key、value 与分数"),
    "vectors and scores": ("computed: vectors, scores", "计算的向量、分数个数"),
    "keys": ("keys", "key"),
    "values": ("values", "value"),
    "visible scores": ("scores", "分数"),
    "without a cache": ("without a cache", "没有 cache"),
    "with a cache": ("with a cache", "有 cache"),
    "tokens so far": ("tokens so far", "已有的 token 数"),
    "decoding flops": ("FLOPs of one compiled step of {model}", "{model} 编译后单步的 FLOPs"),
    "FLOPs of a step": ("FLOPs of a step", "单步 FLOPs"),
    "flops ratio": ("{ratio:.0f} times fewer with a cache at {length}", "{length} token 时少 {ratio:.0f} 倍"),
    "decoding limits": (
        "What a step waits for: one token more in each text of {length:,}",
        "单步在等什么：每段 {length:,} token 的文本各生成一个 token",
    ),
    "limits note": (
        "{model} on one TPU {chip} device at published rates: {peak:,.0f} TFLOP/s and {bandwidth:,.0f} GB/s from HBM; "
        "one text: {flops:.1f} GFLOP, and {bytes} to read, of which {weights} are weights; the ms axis is "
        "logarithmic{beyond}",
        "{model}，单个 TPU {chip} 设备、公布的峰值：{peak:,.0f} TFLOP/s，HBM {bandwidth:,.0f} GB/s；一段文本："
        "{flops:.1f} GFLOP，需读取 {bytes}，其中权重 {weights}；毫秒轴为对数{beyond}",
    ),
    "bytes take": ("weights and cache arrive", "读取权重与 cache"),
    "products take": ("products are computed", "矩阵乘法"),
    "texts together": ("texts decoded together", "一起解码的文本数"),
    # Experts.
    "experts a token": ("experts that a token visits", "每个 token 经过的 expert 数"),
    "stored": ("stored", "总参数"),
    "used by a token": ("used by a token", "每 token 激活"),
    "experts in a layer": ("experts in a layer", "每层的 expert 数"),
    "billions of parameters": ("billions of parameters", "参数（十亿）"),
    "expert parameters": ("What grows with what: total and active parameters", "什么随什么增长：总参数与激活参数"),
    "parameters note": (
        "{model} with more experts of the same size, a token visits {top}; from {few} to {many} experts the used ones "
        "grow by {creep:.3f} billion only: the router scores every expert",
        "{model}，expert 大小不变、数量增加，每个 token 经过 {top} 个；expert 从 {few} 增到 {many} 个，激活参数只多 "
        "{creep:.3f} B：router 要给每个 expert 打分",
    ),
    "assignments": ("assignments", "分配次数"),
    "share of assignments": ("share of assignments", "分配比例"),
    "over the mean": ("largest / mean", "最大 / 平均"),
    "even share": ("even share", "平均份额"),
    "usual capacity": ("{factor:g}: the package's own", "{factor:g}：本项目默认"),
    "shared cell": ("shared: every token visits it", "共享：每个 token 都经过"),
    "router": ("Mixture of experts: who is picked", "MoE：每个 token 选中哪些 expert"),
    "router note": (
        "routers at their initial weights, random tokens; a square is an expert; the stronger its colour, the more "
        "weight; below: how many of {count} tokens each gets",
        "初始权重的 router，随机 token；每格一个 expert，颜色越鲜明权重越大；下方：{count} 个 token 中各分到多少",
    ),
    "and shared": (" + 1 shared", " + 1 个共享"),
    "load of": ("load of {count} tokens", "{count} 个 token 的负载"),
    "load": ("Load of the experts before and after training", "训练前后各 expert 的负载"),
    "load note": (
        "a tiny model trained on the spot; share of the last layer's assignments on unseen tokens, grey: before",
        "现场训练的小模型；最后一层在未见 token 上的分配比例，灰色为训练前",
    ),
    "before training": ("before", "训练前"),
    "after training": ("after", "训练后"),
    "violation": ("largest load over the mean, step by step (1 is even)", "最大负载 / 平均负载（1 为均衡）"),
    "remedy none": ("no balancing", "不做均衡"),
    "remedy auxiliary": ("auxiliary loss", "辅助 loss"),
    "remedy correction": ("bias (loss-free)", "bias（无辅助 loss）"),
    "trained with": ("trained: {remedy}", "训练后：{remedy}"),
    "step": ("training step", "训练步"),
    "dropped": ("Tokens dropped over capacity", "容量与被丢弃的 token"),
    "dropped note": (
        "{count} random tokens, routers at their initial weights; 1 has room for an even share",
        "{count} 个随机 token，初始权重的 router；1 恰好容纳平均份额",
    ),
    "capacity factor": ("slots of an expert, times an even share", "每个 expert 的槽位（平均份额的倍数）"),
    "dropped share": ("assignments dropped", "被丢弃的分配"),
    # A token's journey.
    "journey": (
        "One token's journey: kitten run -ed all day, it is so → tired",
        "一个 token 的旅程：小猫跑了一天，它很 → 累",
    ),
    "journey note": (
        "a tiny model trained on the spot; bold: the residual stream, else what a part reads of it or adds to it",
        "现场训练的小模型；粗体是残差流，其余是各部件读到或写入的向量",
    ),
    "vector of": ("the vector of “{token}”", "“{token}” 的向量"),
    "heads look": ("where “{token}” looks, head by head", "“{token}” 的每个 head 看向哪里"),
    "next token": ("softmax over the vocabulary: what comes next", "对词表的 softmax：下一个 token"),
    "feature": ("feature", "维度"),
    "token and logit": ("token and its logit", "token 及其 logit"),
    "layer and head": ("layer {layer}, head {head}", "第 {layer} 层 head {head}"),
    "stage embedding": ("embedding", "embedding"),
    "stage norm": ("{layer} norm", "{layer} norm"),
    "stage head": ("{layer} + head {head}", "{layer} + head {head}"),
    "stage attended": ("{layer} after attention", "{layer} attention 之后"),
    "stage ffn": ("{layer} + FFN", "{layer} + FFN"),
    "stage residual": ("{layer} after FFN", "{layer} FFN 之后"),
    "stage final norm": ("final norm", "最终 norm"),
    "softmax steps": ("Softmax: from scores to weights", "Softmax：从分数到权重"),
    "score z": ("score z", "分数 z"),
    "power": ("e^z", "e^z"),
    "weight sum": ("e^z / sum: weights, which add up to 1", "e^z / 总和：权重，相加为 1"),
}
