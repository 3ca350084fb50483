"""Builds ringcomm: csrc and kernels become ringcomm._kernels, ringcomm._C and ringcomm._cuda.

Metadata is in pyproject.toml. This file has what depends on the machine: the extensions, and the
version and the requirement on torch, which both name the torch of the build.
"""

import os
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # before any import that an older Python cannot parse
    sys.exit(f"ringcomm needs Python >= 3.10; this is {sys.version.split()[0]}.")

# torch loads installed backends; an older ringcomm whose folder has moved would fail to load.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import buildconfig
import cuda_kernels
import setuptools

# torch does not require it, but its object collectives need it.
NUMPY = "numpy>=1.26"

# An sdist and the list of build requirements must work without torch.
NEEDS_NO_TORCH = ("sdist", "egg_info", "clean", "--name", "--version", "--help")


def torch_minor() -> str:
    """Returns the minor version of the installed torch, such as "2.13", after the checks."""
    try:
        import torch
    except ImportError as error:
        raise buildconfig.BuildProblem(
            "ringcomm is compiled against the installed torch, but `import torch` failed"
            f" ({error}). Install torch >= 2.11, or let pip bring {buildconfig.TORCH}:"
            " pip install . (without --no-build-isolation)"
        ) from error
    version = buildconfig.parse_version(torch.__version__)
    if version < buildconfig.MIN_TORCH:
        raise buildconfig.BuildProblem(
            f"ringcomm needs torch >= 2.11; installed is {torch.__version__}. "
            "pip install --upgrade torch"
        )
    return f"{version[0]}.{version[1]}"


def make_extensions() -> "list[setuptools.Extension]":
    """Returns the extensions; that of GPUs where it is wanted."""
    from torch.utils import cpp_extension

    found = []
    for parts in buildconfig.EXTENSIONS:
        if not buildconfig.sources(*parts.with_torch):
            raise buildconfig.BuildProblem(f"no source of {parts.name}: is the checkout complete?")
        if parts.name == "_cuda" and not wants_cuda():
            continue
        units = buildconfig.units(parts, ROOT / "build" / f"joined{parts.name}")
        extension = cpp_extension.CppExtension(
            f"ringcomm.{parts.name}",
            [str(path.relative_to(ROOT)) for path in units],
            include_dirs=[str(folder) for folder in buildconfig.INCLUDED],
            # setuptools asks whether to call ninja, which knows what a unit includes.
            depends=[str(path.relative_to(ROOT)) for path in buildconfig.cpp_files()],
            extra_compile_args={"cxx": buildconfig.cxx_flags()},
            extra_link_args=[*buildconfig.LINK_FLAGS],
        )
        found.append(extension)
    return found


def wants_cuda() -> bool:
    """Returns whether to build what GPUs need: with a CUDA torch and a driver, or by RINGCOMM_CUDA.

    What lies in the checkout already is built again: it would not fit the others.
    """
    import torch

    if os.environ.get("RINGCOMM_CUDA"):
        return buildconfig.is_set("RINGCOMM_CUDA")
    has_gpu = torch.version.cuda is not None and cuda_kernels.has_driver()
    return has_gpu or any(ROOT.glob("ringcomm/_cuda.*.so"))


def compile_kernels() -> "list[str]":
    """Compiles the kernels if RINGCOMM_CUDA=1 and nvcc is here; returns the flags that embed them.

    For the GPUs that are here, or RINGCOMM_CUDA_ARCHS.
    """
    nvcc = buildconfig.find_nvcc()
    if os.environ.get("RINGCOMM_CUDA") != "1" or nvcc is None:
        return []
    archs = cuda_kernels.archs_asked() or cuda_kernels.archs_here() or cuda_kernels.ARCHITECTURES
    # Measured as 80 s a core and architecture.
    minutes = 1 + 80 * len(archs) // 60 // min(buildconfig.num_jobs(), max(2, len(archs)))
    names = ", ".join(f"sm_{arch}" for arch in archs)
    print(f"[cuda] compiling kernels for {names}, some {minutes} min", file=sys.stderr, flush=True)
    images = cuda_kernels.compile_all(nvcc, ROOT / "build" / "cuda", archs)
    return [f'-DRINGCOMM_CUDA_IMAGES="{images}"']


def make_build_ext() -> type:
    """Returns the build_ext command: torch's, with objects that are kept between calls of pip."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, include_paths

    tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}"

    class BuildExt(BuildExtension):
        """Keeps objects in build/, a folder per Python and torch, so that rebuilds are short."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = os.path.join("build", f"ext-{tag}")

        def run(self) -> None:
            super().run()
            buildconfig.write_commands(include_paths())
            if self.inplace and not wants_cuda():
                for stale in ROOT.glob("ringcomm/_cuda.*.so"):  # would not fit the others
                    stale.unlink()

        def build_extension(self, ext: setuptools.Extension) -> None:
            # Each finds those before it beside itself, under their files' names.
            own = self.get_ext_fullpath(ext.name)
            before = [self.get_ext_fullpath(one.name) for one in self.extensions]
            if ext.name == "ringcomm._cuda":
                ext.extra_compile_args["cxx"] += compile_kernels()
            ext.extra_link_args += [f"-Wl,-soname,{os.path.basename(own)}"]
            ext.extra_link_args += before[: before.index(own)]
            super().build_extension(ext)

    return BuildExt


def packages() -> "tuple[list[str], dict[str, str]]":
    """Returns the packages and their folders: kernels/ is installed as ringcomm.kernels."""
    names = setuptools.find_packages(include=["_ringcomm", "ringcomm", "ringcomm.*"])
    names.append("ringcomm.kernels")
    folders = sorted({path.parent.name for path in ROOT.glob("kernels/*/*.py")})
    names += [f"ringcomm.kernels.{folder}" for folder in folders]
    return names, {"ringcomm": "ringcomm", "ringcomm.kernels": "kernels"}


def dynamic_metadata() -> "dict[str, object]":
    """Returns version, requirements and extension, as far as the current command needs them."""
    version = buildconfig.public_version()
    if any(word in sys.argv for word in NEEDS_NO_TORCH):
        return {"version": version, "install_requires": ["torch>=2.11", NUMPY]}
    if buildconfig.parse_version(setuptools.__version__) < (64, 0):
        raise buildconfig.BuildProblem(
            f"setuptools >= 64 is needed, installed is {setuptools.__version__}: "
            "pip install --upgrade setuptools"
        )
    minor = torch_minor()
    buildconfig.check_compiler()
    buildconfig.check_python_headers()
    os.environ["MAX_JOBS"] = str(buildconfig.num_jobs())
    # pip refuses a wheel whose version differs from its sdist's, so one made there has no suffix.
    suffix = "" if (ROOT / "PKG-INFO").exists() else f"+torch{minor}"
    return {
        "version": version + suffix,
        # c10d's classes change from minor to minor: a binary serves exactly one.
        "install_requires": [f"torch=={minor}.*", NUMPY],
        "ext_modules": make_extensions(),
        "cmdclass": {"build_ext": make_build_ext()},
    }


def main() -> None:
    """Runs setuptools; a problem with the machine ends in one message."""
    os.chdir(ROOT)
    try:
        buildconfig.check_platform()
        dynamic = dynamic_metadata()
    except buildconfig.BuildProblem as problem:
        sys.exit(f"\nringcomm cannot be built: {problem}\n")
    names, folders = packages()
    setuptools.setup(
        packages=names,
        package_dir=folders,
        package_data={"ringcomm": ["py.typed", "*.pyi"], "ringcomm.show": ["*.html", "*.js"]},
        entry_points={
            "torch.backends": ["ringcomm = _ringcomm.autoload:register"],
            "vllm.general_plugins": ["ringcomm = ringcomm.integrations.vllm:plugin"],
            "console_scripts": ["ringcomm = _ringcomm.start:main"],
        },
        project_urls={"Source": url} if (url := buildconfig.address()) else {},
        license="Apache-2.0",
        license_files=["LICENSE"],
        zip_safe=False,
        **dynamic,
    )


if __name__ == "__main__":
    main()
