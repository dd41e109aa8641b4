"""vLLM's side of a weight update: load one safetensors file into the running model.

``register`` is our ``vllm.general_plugins`` entry point: vLLM calls it in each of its
processes. It adds one name to a registry and changes nothing for other users of vLLM.
"""

from __future__ import annotations

BACKEND = "tidemill"
"""Name under which vLLM knows our transport."""

OWNER_VARIABLE = "TIDEMILL_VLLM_OWNER"
"""Environment variable: process id of the engine's owner, without whom vLLM's processes must not live."""


def register() -> None:
    """Make the ``tidemill`` weight transfer engine known to vLLM; may be called any number of times."""
    import os

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "producers.engines.vllm.weight_loader", "FileWeightTransferEngine"
        )
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is not None and owner != str(os.getpid()):
        _die_with(os.getppid())


def _die_with(parent: int) -> None:
    """End this process when ``parent`` does, however that ends: a killed owner must not leave the model in memory.

    A thread that looks once a second: PR_SET_PDEATHSIG would act when the parent's *thread* ends.
    """
    import os
    import signal
    import threading

    if any(thread.name == "tidemill-owner" for thread in threading.enumerate()):
        return
    never = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            never.wait(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="tidemill-owner", daemon=True).start()
