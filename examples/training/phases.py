"""The phases in their order, and what is said between them."""

from __future__ import annotations

import os
import platform
import time

import torch

from training.checkpoint import FILE_NAME
from training.evaluate import held_out_bits_per_byte, prompt_of, sample
from training.job import Job
from training.launch import Interrupted
from training.learn import Learned, learn, system_bytes
from training.options import CONTEXT_BYTES
from training.replay import replay
from training.report import draw, megabytes
from training.systems import build_system
from training.wire import comparison_sign

SAMPLE_BYTES = 160


def _say_start(job: Job) -> None:
    options, corpus, say = job.options, job.corpus, job.screen.say
    say(f"text      {corpus.name}: {len(corpus.data):,} bytes, sha256 {corpus.sha256}")
    say(
        f"split     {corpus.split:,} bytes to learn from, the last "
        f"{len(corpus.held_out):,} held out"
    )
    say(
        f"model     {options.size}: {job.config.num_params:,} parameters "
        f"({job.config.num_layers} layers, width {job.config.dim}, byte vocabulary)"
    )
    over = " and ".join(dict.fromkeys(options.backends)) if job.wires else "no backend"
    say(
        f"ranks     {job.world_size} on {os.cpu_count()} cores, one thread each; {over}; "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    say(f"results   {job.run_dir}")
    job.log.write(
        "run",
        options=options.as_json(),
        sha256=corpus.sha256,
        num_bytes=len(corpus.data),
        num_params=job.config.num_params,
        torch=torch.__version__,
        num_cores=os.cpu_count(),
    )


def _say_sent(job: Job, learned: Learned) -> None:
    """Bytes of phase 1 against the formula; a difference fails a run of 2 ranks."""
    if not job.wires or job.world_size == 1:
        return
    if learned.sent is None:
        job.screen.say(
            f"{job.wires[0].backend} does not count what it sends; by the formula each rank sent "
            f"{megabytes(learned.formula_bytes)} MB"
        )
        return
    sent = system_bytes(learned.sent)
    rest = learned.sent.total - sent
    job.screen.say(
        f"rank 0 sent {sent:,} bytes {comparison_sign(sent, learned.formula_bytes)} "
        f"{learned.formula_bytes:,.0f} by the formula, and {rest:,} bytes of control and "
        "experts' tokens besides"
    )
    if job.world_size == 2 and sent != learned.formula_bytes:
        job.fail(f"learning: {sent} bytes sent, formula {learned.formula_bytes:.0f}")


def _evaluate(job: Job, learned: Learned) -> None:
    """Held-out bits per byte beside gzip's, and a sample; rank 0 alone."""
    assert learned.final is not None
    system = build_system(
        "single", job.options.optimizer, job.config, None, learned.final.state, job.device
    )
    corpus = job.corpus
    bits = held_out_bits_per_byte(system.model, corpus, CONTEXT_BYTES, job.device)
    gzip_held, gzip_whole = corpus.gzip_bits_per_byte()
    job.screen.say(
        f"held out  [bold]{bits:.3f} bits per byte[/bold]; gzip -9 needs {gzip_held:.3f} for the "
        f"same bytes alone and {gzip_whole:.3f} for the whole text"
    )
    prompt = prompt_of(corpus)
    written = sample(
        system.model, prompt, SAMPLE_BYTES, CONTEXT_BYTES, job.options.seed, job.device
    )
    job.screen.say(f"sample    {SAMPLE_BYTES} bytes after {prompt!r}:".replace("[", r"\["))
    job.screen.quote(repr(written.decode("utf-8", errors="replace"))[1:-1])
    job.log.write(
        "evaluation",
        bits_per_byte=bits,
        gzip_held_out=gzip_held,
        gzip_whole=gzip_whole,
        sample=written.decode("latin-1"),
    )


def run_phases(job: Job) -> None:
    """Learn, replay, evaluate, report. Collective.

    Raises:
        Interrupted: on all ranks alike; the checkpoint is written.
    """
    options, screen = job.options, job.screen
    _say_start(job)
    began = "continues" if job.start.step else "begins"
    screen.title(
        f"1  learning with {options.parallel} and {options.optimizer}; {began} at step "
        f"{job.start.step}"
    )
    learned = learn(job)
    if learned.interrupted:
        raise Interrupted
    _say_sent(job, learned)
    replays = replay(job, learned) if learned.losses else None
    if job.is_first:
        _evaluate(job, learned)
    if options.why_no_race is not None:
        screen.say(f"\nno race: {options.why_no_race}")
    if job.is_first:
        picture = draw(job, learned, replays)
        names = f"{FILE_NAME}, train.jsonl" + (", train.png" if picture else "")
        seconds = time.perf_counter() - job.began
        screen.say(f"\n{job.run_dir}: {names}; {seconds:.0f} s in all")
