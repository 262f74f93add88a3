"""What figures of meshes and of runs say."""

WORDS = {
    # Sharding.
    "device": ("device {numbers}", "设备 {numbers}"),
    "placed": (
        "{model} · [{shape}] = {size} in bfloat16 · mesh {mesh} · {each} a device; copies of each part: "
        "{copies}{stacked}; numbers in the drawing are devices",
        "{model} · [{shape}] = {size}（bfloat16）· 设备网格 {mesh} · 每个设备 {each}；每部分的副本数："
        "{copies}{stacked}；图中数字是设备编号",
    ),
    "stacked": ("; {block}: its {layers} layers lie in one array", "；{block}：{layers} 层叠放在一个数组里"),
    "array ffn/up/kernel": ("FFN: up projection", "FFN：升维投影"),
    "array attention/query/kernel": ("attention: query projection", "attention：query 投影"),
    "array attention/key/kernel": ("attention: key projection", "attention：key 投影"),
    "array embedding/token": ("embedding table", "embedding 表"),
    "array activation/residual": ("activation: residual stream", "激活：残差流"),
    "array activation/heads": ("activation: features of the heads", "激活：各 head 的特征"),
    # A plan.
    "hbm plan": ("What one device holds of {model}", "单个设备上 {model} 占多少内存"),
    "hbm note": (
        "{rows} rows of {length:,} tokens on all devices, at the worst moment, by analysis. Training computes in "
        "bfloat16 and keeps parameters in float32 ({bytes} bytes × {count:.2f}B), decoding has them in bfloat16 (2 "
        "bytes). remat {remat}: what the backward pass computes again instead of keeping it. Dotted: what TPU chips "
        "have; bars that no chip has room for are cut",
        "全部设备共 {rows} 行 × {length:,} token，分析得到的峰值时刻。训练用 bfloat16 计算，参数保持 float32（{bytes}"
        " 字节 × {count:.2f}B）；解码时参数为 bfloat16（2 字节）。remat {remat}：反向时重算哪些而不保存。虚线为各 "
        "TPU 芯片的容量；任何芯片都放不下的柱子被截断",
    ),
    "in training": ("in training", "训练时"),
    "in decoding": ("in decoding", "解码时"),
    "GiB of a device": ("GiB of a device", "单个设备 GiB"),
    "held parameters": ("parameters", "参数"),
    "held optimizer": ("Adam's moments", "Adam 动量"),
    "held gradients": ("gradients", "梯度"),
    "held activations": ("activations", "激活"),
    "held cache": ("KV cache", "KV cache"),
    "held buffers": ("buffers", "缓冲区"),
    "step traffic": ("What a device sends in a training step", "一个训练步里单个设备发送多少"),
    "traffic of": (
        "compiled step of {model} on {mesh}, {rows} rows of {length} tokens",
        "{model} 在 {mesh} 上编译出的一步，{rows} 行 × {length} token",
    ),
    "sent along": ("as compiled: along which mesh axes", "编译后的程序：沿哪些网格轴"),
    "sent for": ("what for", "用途"),
    "by shapes": ("from shapes alone", "仅由形状推算"),
    "as compiled": ("as compiled", "编译后的程序"),
    "sent parameters": ("gathering parameters", "收集参数"),
    "sent gradients": ("summing gradients", "汇总梯度"),
    "sent activations": ("summing activations", "汇总激活"),
    "sent tokens": ("moving tokens", "搬运 token"),
    "tokens note": (
        "moving tokens: to their experts, and, in every model, to and from the rows of a split embedding table",
        "搬运 token：送往各 expert；任何模型都要与切分的 embedding 表交换",
    ),
    "mesh traffic": ("The same devices, more of them along the tensor axis", "设备数不变，tensor 轴变长"),
    "mesh traffic note": (
        "bytes that each of {devices} devices must send in a training step of {model}, {rows} rows of "
        "{length:,} tokens, bfloat16",
        "{model} 一个训练步中，{devices} 个设备各自必须发送的字节数，{rows} 行 × {length:,} token，bfloat16",
    ),
    # A run.
    "training curves": ("Loss, as the run goes", "训练中的 loss"),
    "on batches": ("batches trained on", "训练 batch"),
    "held out": ("held out", "验证集"),
    "nats a token": ("nats a token", "每 token 的 nat"),
    "run panels": ("Step by step", "逐步记录"),
    "bits a byte": ("bits a byte (grey: trained on, blue: held out)", "每字节 bit（灰：训练，蓝：验证）"),
    "learning rate": ("learning rate", "学习率"),
    "gradient norm": ("norm of the gradient", "梯度范数"),
    "tokens a second": ("tokens a second", "每秒 token"),
    "waiting for data": ("share of the time that waits for data", "等待数据的时间占比"),
    "model flops": ("share of the peak FLOP/s", "峰值算力利用率"),
    "steps skipped": ("steps skipped", "跳过的步数"),
    "pairs exact": ("pairs answered exactly", "完全答对的比例"),
    "experts violation": ("experts: largest load over the mean, worst layer", "expert：最大负载与均值之比（最差层）"),
    "experts dropped": ("experts: share of assignments dropped, worst layer", "expert：被丢弃的比例（最差层）"),
    "experts entropy": ("experts: entropy of the router in nats, lowest layer", "路由器熵（nat，最低层）"),
    "run gradient": ("Norms of gradients", "梯度范数"),
    "run parameter": ("Norms of parameters", "参数范数"),
    "run activation": ("What leaves each layer: root mean square", "每层输出的均方根"),
    "log10": ("log10", "log10"),
    "picks": ("Experts that each token is sent to", "每个 token 被送到哪些 expert"),
    "picks note": (
        "layer {layer}: {count} tokens use {used} of {experts} experts; a stronger colour counts more",
        "第 {layer} 层：{count} 个 token 用到 {experts} 个 expert 中的 {used} 个；颜色越鲜明权重越大",
    ),
}
