"""The build backend: scikit-build-core's, with NVIDIA's compiler among the requirements where `cuda_wheels` says so.

What was compiled of the same text is not compiled again: pip builds in a new environment each time, in which
scikit-build-core begins anew.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import cuda_wheels
from scikit_build_core import build

if shutil.which("bash") and shutil.which("sha256sum"):
    os.environ.setdefault("JAXNORM_OBJECTS", str(Path.cwd() / "build" / "objects"))
    for language in ("CXX", "CUDA"):
        os.environ.setdefault(f"CMAKE_{language}_COMPILER_LAUNCHER", str(Path(__file__).with_name("compile_once")))


def __getattr__(hook: str) -> Any:
    """Those that are not here are scikit-build-core's."""
    return getattr(build, hook)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*build.get_requires_for_build_wheel(config_settings), *cuda_wheels.wanted()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*build.get_requires_for_build_editable(config_settings), *cuda_wheels.wanted()]
