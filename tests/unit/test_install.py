"""The set-up's choices: which vLLM, and which of its requirements."""

from __future__ import annotations

from deploy.install import choose_vllm, requirements_of, wanted


def test_vllm_fits_the_machine() -> None:
    assert choose_vllm("Linux", has_gpu=True) == "cuda"
    assert choose_vllm("Linux", has_gpu=False) == "cpu"
    assert choose_vllm("Darwin", has_gpu=False) == "none"


def test_what_would_bring_a_cuda_build_is_left_out() -> None:
    requirements = [
        "torch==2.13.0",
        "torchvision; platform_machine != 'riscv64'",
        "torchaudio",
        "TorchCodec>=0.14",
        "numba==0.65.0; python_version >= '3.10'",
        "fastapi[standard]<0.137.0,>=0.133.0",
        "old-thing; python_version < '3.0'",
        "extra-thing; extra == 'bench'",
    ]
    assert wanted(requirements) == ["numba==0.65.0", "fastapi[standard]<0.137.0,>=0.133.0"]


def test_an_extra_brings_what_the_extras_that_it_names_bring() -> None:
    project = {
        "name": "tidemill",
        "dependencies": ["redis>=8"],
        "optional-dependencies": {
            "text": ["jinja2>=3"],
            "train": ["tidemill[text]", "torch>=2"],
            "data": ["datasets>=5"],
        },
    }
    assert requirements_of(project, []) == ["redis>=8"]
    assert requirements_of(project, ["train"]) == ["redis>=8", "torch>=2", "jinja2>=3"]
