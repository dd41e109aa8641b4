"""The error of a refused request, apart from the web server: commands raise and catch it without loading one."""

from schemas.errors import TidemillError


class Refusal(TidemillError):
    """Error that refuses a request with this HTTP status; the text says what to do."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
