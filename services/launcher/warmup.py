"""`warmup`: compile the kernels that serving a model needs into one folder, ahead of the first start.

It builds the engine as a scheduler with these settings would, all its ranks, on random weights, and has it compute
every kind of step once. Owns the words; what is compiled is the engine's.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from services.launcher.supervisor import say
from services.scheduler.settings import SchedulerSettings
from shared.errors import ConfigError
from shared.model_files import locate

if TYPE_CHECKING:
    from services.scheduler.engine.kernel_cache import KernelCache

EXIT_NO_GPU: Final = 1


def run(settings: SchedulerSettings) -> int:
    """Compile, tell what, and give the exit code.

    Raises:
        ConfigError: the settings name something that has no kernels, or that cannot be built.
    """
    if settings.engine == "fake":
        raise ConfigError("MILLRACE_ENGINE: the fake engine has no kernels to compile")
    if settings.device == "cpu":
        raise ConfigError("MILLRACE_DEVICE: kernels are compiled for GPUs; on a CPU there is nothing to warm up")
    # torch only where it is used
    from services.scheduler.engine.engine import build_engine
    from services.scheduler.engine.kernel_cache import kept_kernels
    from services.scheduler.service import engine_config

    began = time.monotonic()
    with kept_kernels(settings.kernel_cache_dir, settings.device) as cache:
        if cache is None:
            say(
                "warmup compiles for the GPU that it runs on, and torch sees none here: run it on a machine of the "
                "kind that will serve, or in a container with its GPU"
            )
            return EXIT_NO_GPU
        had, _ = cache.size()
        files = locate(settings.model, settings.model_source, revision=settings.model_revision, weights=False)
        build_engine(replace(engine_config(settings), load_format="dummy"), files).close()
    _tell(cache, had, settings.tensor_parallel_size, time.monotonic() - began)
    return 0


def _tell(cache: "KernelCache", had: int, ranks: int, seconds: float) -> None:
    """Say what was compiled: by this rank by name, by the others by what the folder has gained."""
    kernels, num_bytes = cache.size()
    compiled, found, gained = cache.compiled.total(), cache.found.total(), kernels - had
    if compiled:
        say(f"compiled {compiled} kernels in {cache.compile_s:.1f} s of {seconds:.1f} s, {found} were there:")
        for name, forms in sorted(cache.compiled.items()):
            say(f"  {name}" + (f", {forms} forms" if forms > 1 else ""))
    elif gained:
        say(f"the other ranks compiled {gained} kernels in {seconds:.1f} s; all {found} of rank 0 were there")
    elif found:
        say(f"nothing to compile: all {found} kernels were there ({seconds:.1f} s)")
    else:
        say(f"nothing to compile: this model runs without kernels of ours ({seconds:.1f} s)")
    of_ranks = f" ({gained} of them new, for {ranks} ranks)" if ranks > 1 else ""
    say(f"{cache.folder} holds {kernels} kernels{of_ranks}, {num_bytes / 1e6:.1f} MB")
    say(f"serve with --cache-dir {cache.folder}")
