"""The main job of ringcomm: a small language model trained, replayed and raced.

Reading order: ``cli`` (options) -> ``launch`` (ranks) -> ``job`` (what one rank does) -> ``learn``
(phase 1), ``replay``, ``race`` (phase 2) -> ``report``. The training systems stand in ``systems``,
``lomo``, ``zero1`` and ``tensor_parallel``; every byte they send passes through ``wire``.
"""
