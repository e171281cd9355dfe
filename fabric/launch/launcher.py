"""The base class of launchers: start the ranks, run a function in them, supervise them until they exit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Launcher(ABC):
    """Starts the processes of a job and runs a function in them."""

    start_method: str
    """"popen", "spawn", "fork" or "forkserver"."""

    @abstractmethod
    def launch(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Start the ranks and return rank zero's result of `function(*args, **kwargs)`.

        Raises:
            LaunchError: The ranks cannot be started, or one of them failed.
        """
