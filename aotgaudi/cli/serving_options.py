"""Options of commands that use a bundle: which bundles they accept, the model, the log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.cli import leave_out_of_path
from aotgaudi.cli.options import option, options_of, said
from aotgaudi.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class _Demands:
    trusted_keys: tuple[Path, ...] = option(
        "Public key, one of which must have signed the bundle (repeatable).",
        "--trusted-key",
        default=(),
        metavar="PEM",
    )
    allow_unsafe_permissions: bool = option(
        "Accept files that users other than you and root own or may write to.", default=False
    )

    def acceptance(self) -> TrustPolicy:
        """Returns what is accepted. Raises SpecError like `TrustPolicy.demanding`."""
        return TrustPolicy.demanding(
            self.trusted_keys,
            allow_unsafe_permissions=self.allow_unsafe_permissions,
        )


acceptance_options = options_of(_Demands, "acceptance", made=_Demands.acceptance)
"""Which bundles a command accepts. It gets `acceptance`, a `TrustPolicy`."""


LOG_FORMAT = said("Lines of the log: text, or one JSON object each.")


def find_model(model: str) -> Path:
    """Returns a model directory: the path itself, or a snapshot of a hub id. Raises SpecError and RemoteError.

    Modules are not searched in a directory.
    """
    path = Path(model)
    if path.is_dir():
        leave_out_of_path(path)
        return path
    from aotgaudi.bundle.model_directory import fetch_model, is_hub_id

    if path.exists() or not is_hub_id(model):
        raise SpecError(
            model, "is not a model directory", "a directory with config.json and safetensors, or a hub id"
        )
    return fetch_model(model, ["*.json", "*.safetensors", "*.jinja"])
