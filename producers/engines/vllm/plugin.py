"""vLLM's side of a weight update: load one safetensors file into the running model.

``register`` is our ``vllm.general_plugins`` entry point: vLLM calls it in each of its
processes. It adds one name to a registry and changes nothing for other users of vLLM.
"""

BACKEND = "tidemill"
"""The name of our weight transfer engine in vLLM."""

OWNER_VARIABLE = "TIDEMILL_VLLM_OWNER"
"""The environment variable with the process id of the engine's owner; vLLM's processes end with it."""


def register() -> None:
    """Register the ``tidemill`` weight transfer engine with vLLM; may be called any number of times."""
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
    """End this process when ``parent`` ends, however it ends, so that a killed owner leaves no model in memory.

    A thread checks once a second: PR_SET_PDEATHSIG would act when the parent's *thread* ends.
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
