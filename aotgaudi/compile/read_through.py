"""Which records of a build a remote is asked for, and which are uploaded to it. Imports no torch."""

from __future__ import annotations

from aotgaudi.compile.keys import (
    BuiltRow,
    ModelCheckRow,
    ProgramRow,
    UnitRow,
    read_programs,
    record,
)
from aotgaudi.compile.plan import Plan
from aotgaudi.share.remote_cache import RemoteCache
from aotgaudi.store.store import Store


def fetch_missing(plan: Plan, store: Store, remote: RemoteCache) -> bool:
    """Fetches into `store` what `plan` lacks and `remote` has: programs first, then their units.

    Returns whether anything came, so that a new plan finds more. Raises StoreError.
    """
    check, checked = plan.model_check, None
    if check is not None and check.row is None:
        checked = remote.look_up(check.key.hex, ModelCheckRow.model_validate, record)
    untraced = [state.key.hex for state in plan.untraced]
    num_found = remote.look_up_all(untraced, ProgramRow.model_validate, record)
    traced = read_programs(store, untraced if num_found else ())
    units = {key for row in traced.values() for key in row.units} - plan.units.keys()
    num_found += remote.look_up_all([*plan.missing_units, *units], UnitRow.model_validate, record)
    return num_found > 0 or (checked is not None and checked.result())


def upload_all(plan: Plan, remote: RemoteCache) -> None:
    """Uploads everything that `plan` found and `remote` lacks. Does not wait."""
    for key, row in rows_of(plan).items():
        remote.upload(key, row)


def rows_of(plan: Plan) -> dict[str, BuiltRow]:
    """Returns the records that `plan` found, by key."""
    rows: dict[str, BuiltRow] = {state.key.hex: state.row for state in plan.programs if state.row}
    if plan.model_check is not None and plan.model_check.row is not None:
        rows[plan.model_check.key.hex] = plan.model_check.row
    return rows | plan.units
