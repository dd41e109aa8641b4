"""Environments of other packages, in worker processes with an interpreter of their own where packages conflict."""

from pathlib import Path

_HERE = Path(__file__).parent
ENVIRONMENTS = {
    "actions": f"{_HERE / 'action_tokens.py'}:ActionTokens",
    "gymnasium": f"{_HERE / 'gymnasium_text.py'}:GymnasiumText",
    "openenv": f"{_HERE / 'openenv_client.py'}:OpenEnvClient",
    "retry": f"{_HERE / 'retry.py'}:Retry",
    "textarena": f"{_HERE / 'textarena_game.py'}:TextArenaGame",
}
"""Built-in environments by name, each a file that needs nothing of Tidemill, since another interpreter runs it."""
