"""Engines: token ids in, tokens with processed log-probabilities and version spans out."""

from schemas.plugins import Registry

ENGINES = Registry(
    "generator.engine",
    {
        "vllm": "producers.engines.vllm.engine:VllmEngine",
        "transformers": "producers.engines.transformers.engine:TransformersEngine",
        "http": "producers.engines.http.engine:build_engine",
        "mlp": "producers.embodied.mlp_engine:MlpEngine",
        "scripted": "producers.engines.scripted:ScriptedEngine",
    },
    {"sglang": "set generator.engine http, and dialect sglang in generator.http"},
)
