"""The questions that readers ask themselves, and their answers, in each language."""

WORDS = {
    "section check": ("Check yourself", "自检"),
    "about check": (
        "Answer first, then open. Links lead to the figure in which the answer can be seen.",
        "先自己回答，再展开。链接指向能看到答案的图。",
    ),
    "question 1": (
        "From the original Transformer to Llama 3, which four things changed in the block, and what does each solve?",
        "从原版 Transformer 到 Llama 3，block 里改了哪四处？各自解决什么问题？",
    ),
    "answer 1": (
        "[The blocks side by side](#families-0) number them. (1) Norm: LayerNorm after the sum became RMSNorm before "
        "each branch; the residual stream is now a straight way for gradients, so that deep stacks train stably, and "
        "RMSNorm computes less. (2) Positions: sinusoids added to the embedding became RoPE, which turns queries and "
        "keys in every layer, so that [scores depend on the distance](#rope-0). (3) Attention: MHA became GQA; query "
        "heads share keys and values, and [the cache shrinks](#caches-0). (4) FFN: ReLU became SwiGLU, in which one "
        "branch gates the other; it gives better models for the same size. Encoder and cross-attention went too, but "
        "that is the layout, not the block.",
        "[两个 block 并排](#families-0)，编号标出了变化。（1）Norm：相加之后的 LayerNorm 变成分支之前的 RMSNorm；残差"
        "流成为梯度的直通路，深层训练更稳，RMSNorm 计算也更少。（2）位置：加在 embedding 上的正弦变成 RoPE，在每层旋"
        "转 query 和 key，[分数取决于相对距离](#rope-0)。（3）Attention：MHA 变成 GQA，多个 query head 共享 K/V，"
        "[cache 变小](#caches-0)。（4）FFN：ReLU 变成 SwiGLU，由一条分支门控另一条，同样规模下效果更好。encoder 和 "
        "cross-attention 也没有了，但那是整体结构，不是 block 内部。",
    ),
    "question 2": (
        "Under which conditions can a KV cache be reused? Why may memory bandwidth still be the limit, when so much "
        "computing is saved?",
        "KV cache 在什么条件下可以复用？为什么减少计算后，仍可能卡在内存带宽？",
    ),
    "answer 2": (
        "Keys and values of a token depend on the weights, on the tokens before it and on its position, and under a "
        "causal mask on nothing later. So they can be reused as long as the weights, the prefix and the handling of "
        "positions stay as they were, and nothing is random (no dropout). [Change one token](#attention-1): its own "
        "entry dies in every layer, and behind the first layer those of all tokens after it; those before stay. [It "
        "saves work](#decoding-0): {cached} instead of {without} keys, values and scores over 16 steps. But a step "
        "that computes so little still reads all weights and the whole cache: for [one text of 8,192 "
        "tokens](#decoding-2) reading takes {read} ms, the products {multiply} ms. More texts at once share the "
        "weights that are read, though not each other's caches.",
        "一个 token 的 K/V 由权重、它之前的 token 和它的位置决定；causal mask 下与后面的 token 无关。所以只要权重、前"
        "缀和位置处理都不变，且没有随机性（关闭 dropout），就可以复用。[改一个 token](#attention-1)：它自己在每层的条"
        "目都作废，第一层之后，它后面所有 token 的条目也作废；前面的不变。[计算量省下很多](#decoding-0)：16 步共 "
        "{cached} 个 key、value 和分数，而不是 {without} 个。但这一步虽然算得少，仍要把全部权重和整个 cache 读一遍：["
        "一段 8,192 token 的文本](#decoding-2)，读取要 {read} ms，矩阵乘法只要 {multiply} ms。多段文本一起解码可以分"
        "摊权重的读取，但各自的 cache 仍要各读各的。",
    ),
    "question 3": (
        "What do GQA, MQA and MLA each keep? Why does the cache of MLA not depend on the number of heads?",
        "GQA、MQA、MLA 各自缓存的是什么？MLA 的 cache 为什么和 head 数无关？",
    ),
    "answer 3": (
        "Of each token and layer GQA keeps a key and a value of each group of query heads, MQA one key and one value "
        "for all of them, MLA one latent vector and one rotary key: [{gqa}, {mqa} and {mla} numbers](#caches-0), "
        "where MHA would keep {mha}. Set “query heads” to 256 there: only MHA grows. GQA and MQA stay because their "
        "query heads share a fixed number of keys and values. MLA stays for another reason: [all heads' own keys and "
        "values are made from one latent](#caches-1) by matrices that are weights, not cache; of DeepSeek's {heads} "
        "heads {made} numbers, out of {kept} that are kept.",
        "每层每个 token：GQA 缓存每组 query head 的一个 key 和一个 value；MQA 所有 head 共用一个 key 和一个 value；"
        "MLA 缓存一个 latent 向量加一个 RoPE key。[分别是 {gqa}、{mqa}、{mla} 个数值](#caches-0)，MHA 则要 {mha} 个。"
        "把图中的“query head 数”调到 256：只有 MHA 变大。GQA 和 MQA 不变，是因为 query head 共用固定数量的 K/V。MLA "
        "不变另有原因：[每个 head 自己的 K/V 都由同一个 latent](#caches-1) 乘矩阵得到，那些矩阵是权重，不在 cache 里"
        "；DeepSeek 的 {heads} 个 head 共 {made} 个数值，由缓存的 {kept} 个算出。",
    ),
    "question 4": (
        "A layer with a sliding window sees only w tokens. How does information travel further?",
        "Sliding window 每层只看 w 个 token，信息是怎么传到更远的地方的？",
    ),
    "answer 4": (
        "Through the layers: what a token has gathered in one layer is read by the next layer's window. Each layer "
        "adds w − 1 tokens, so L layers reach L(w − 1) + 1. [Stack layers](#windows-0): six windows of 4 reach "
        "{reach} tokens, measured by gradient; Mistral's 32 windows of 4,096 could reach {far}. That a path exists "
        "does not mean that what is far is remembered; so some models put [layers that see all](#windows-1) between "
        "them.",
        "靠层层接力：一个 token 在某层收集到的信息，会被下一层的窗口读到。每多一层就多 w − 1 个 token，L 层能到达 "
        "L(w − 1) + 1 个。[堆叠层数看看](#windows-0)：6 层、窗口 4，用梯度实测到达 {reach} 个；Mistral 的 32 层、窗口"
        " 4,096 最多到达 {far} 个。有路径不等于一定记得住，所以有的模型隔几层放一个[全局层](#windows-1)。",
    ),
    "question 5": (
        "Why is FlashAttention exact? Which kind of cost does it save?",
        "FlashAttention 为什么是精确的？它省掉的是哪一类开销？",
    ),
    "answer 5": (
        "It computes the same softmax over the same visible keys, only tile by tile: it keeps a maximum, a sum and "
        "an output, and [multiplies what it has by exp(m_old − m_new)](#tiles-1) when the maximum grows, so that in "
        "the end all is divided by the same sum. Nothing is left out but [tiles that the mask hides "
        "whole](#tiles-0). Only the order of the additions differs, so results agree but for rounding. What it saves "
        "is traffic to HBM: the matrices S and P are never written. [At 16,384 tokens](#tiles-2) a head moves "
        "{unskipped} instead of {standard} for the same FLOPs, and {tiled} when hidden tiles are skipped, too.",
        "它对同样的可见 key 算同样的 softmax，只是逐块进行：保留最大值、和与输出，最大值变大时[把已有结果乘以 "
        "exp(m_old − m_new)](#tiles-1)，最后除以同一个和。除了[被 mask 整块挡住的分块](#tiles-0)，什么都没有省略；只"
        "有加法顺序不同，所以结果只差舍入误差。省下的是显存（HBM）读写：S 和 P 两张矩阵从不写出。[16,384 token 时"
        "](#tiles-2)，同样的 FLOPs，一个 head 读写 {unskipped}，而不是 {standard}；再跳过被挡住的分块，是 {tiled}。",
    ),
    "question 6": (
        "What do the total parameters of a mixture of experts grow with, and what the active ones?",
        "MoE 的总参数量和激活参数量，分别随什么增长？",
    ),
    "answer 6": (
        "The total grows with the number of experts (and their size and the layers), the active ones with how many "
        "experts a token visits (and their size, a shared expert, and all that is not an expert). [With 8 "
        "experts](#experts-1), 2 a token, Mixtral has {total} billion, {active} of them active; with 64 of the same "
        "size it would have {more} billion, and {as_active} active. [The grids](#experts-0) show how sparse that is. "
        "All experts have to be stored, whoever is picked.",
        "总参数随 expert 数量增长（还有 expert 大小和层数）；激活参数随每个 token 选中的 expert 数增长（还有 expert "
        "大小、共享 expert 以及所有非 expert 部分）。[8 个 expert 选 2 个](#experts-1)时，Mixtral 总参数 {total}B，激"
        "活 {active}B；换成 64 个同样大的 expert，总参数是 {more}B，激活仍是 {as_active}B。[格子图](#experts-0)能看到"
        "有多稀疏。不管选中谁，所有 expert 都得存下来。",
    ),
}
