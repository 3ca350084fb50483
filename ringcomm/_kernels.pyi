def softmax_shard_entry(
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    num_classes: int,
    wants_weighted: bool,
    wants_more: bool,
) -> tuple[float, float, float, float, float, int]: ...
