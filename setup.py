"""Builds ringcomm: the engine and the bindings become one extension, ringcomm._C.

Metadata is in pyproject.toml. This file has what depends on the machine: the extension, and the
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
            f" ({error}). If torch is installed, pip's build isolation hides it: pip install"
            " --no-build-isolation . -- otherwise install torch >= 2.11 first."
        ) from error
    version = buildconfig.parse_version(torch.__version__)
    if version < buildconfig.MIN_TORCH:
        raise buildconfig.BuildProblem(
            f"ringcomm needs torch >= 2.11; installed is {torch.__version__}. "
            "pip install --upgrade torch"
        )
    return f"{version[0]}.{version[1]}"


def make_extension() -> setuptools.Extension:
    """Returns the extension, with GPU kernels if nvcc and a CUDA torch are installed."""
    from torch.utils import cpp_extension

    bindings = buildconfig.sources(*buildconfig.TORCH_FOLDERS)
    if not bindings:
        raise buildconfig.BuildProblem("csrc/bindings has no source: is the checkout complete?")
    found = buildconfig.sources(*buildconfig.ENGINE_FOLDERS)
    found += buildconfig.joined(bindings, ROOT / "build" / "bindings")
    flags = {"cxx": buildconfig.cxx_flags()}
    nvcc = buildconfig.find_nvcc()
    if nvcc is not None and wants_kernels():
        images = cuda_kernels.compile_all(nvcc, ROOT / "build" / "cuda")
        flags["cxx"].append(f'-DRINGCOMM_CUDA_IMAGES="{images}"')
    return cpp_extension.CppExtension(
        "ringcomm._C",
        [str(path.relative_to(ROOT)) for path in found],
        include_dirs=[str(buildconfig.CSRC)],
        depends=[str(path.relative_to(ROOT)) for path in (*buildconfig.headers(), *bindings)],
        extra_compile_args=flags,
        extra_link_args=["-pthread"],
    )


def wants_kernels() -> bool:
    """Returns whether to compile kernels: for a CUDA torch, or as RINGCOMM_CUDA says."""
    import torch

    asked = os.environ.get("RINGCOMM_CUDA", "")
    return torch.version.cuda is not None if asked == "" else buildconfig.is_set("RINGCOMM_CUDA")


def make_build_ext() -> type:
    """Returns the build_ext command: torch's, with objects that are kept between calls of pip."""
    import torch
    from torch.utils.cpp_extension import BuildExtension

    tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}"

    class BuildExt(BuildExtension):
        """Keeps objects in build/, a folder per Python and torch, so that rebuilds are short."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = os.path.join("build", f"ext-{tag}")

    return BuildExt


def packages() -> "tuple[list[str], dict[str, str]]":
    """Returns the packages and their folders: kernels/ is installed as ringcomm.kernels."""
    names = setuptools.find_packages(include=["ringcomm", "ringcomm.*"])
    folders = {"ringcomm": "ringcomm", "ringcomm.kernels": "kernels"}
    names += ["ringcomm.kernels"]
    names += [f"ringcomm.kernels.{name}" for name in setuptools.find_packages("kernels")]
    return names, folders


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
        "ext_modules": [make_extension()],
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
        package_data={"ringcomm": ["py.typed", "*.pyi"]},
        py_modules=["_ringcomm_autoload"],
        entry_points={
            "torch.backends": ["ringcomm = _ringcomm_autoload:register"],
            "console_scripts": ["ringcomm = ringcomm.cli:main"],
        },
        license="Apache-2.0",
        license_files=["LICENSE"],
        zip_safe=False,
        **dynamic,
    )


if __name__ == "__main__":
    main()
