"""The main job of ringcomm: a small language model trained, replayed and raced.

Reading order: ``cli`` (options) -> ``launch`` (ranks) -> ``job`` (what one rank does) -> ``learn``
(phase 1), ``replay``, ``report``, and ``race`` (phase 2) after the ranks. The training systems are
in ``systems``, ``lomo``, ``zero1`` and ``tensor_parallel``; every byte they send passes through
``wire``.
"""
