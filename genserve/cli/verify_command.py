"""The command `genserve verify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genserve.cli.completion_command import model_names
from genserve.cli.flags import RepositoryFlags
from genserve.errors import GenserveError, InvalidRequest, RepositoryError
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from genserve.textmodel.text_model import TextModel

_DIFFERENT, _NOT_VERIFIED = 1, 2    # exit codes
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class VerifyFlags(RepositoryFlags):
    """The flags of `genserve verify`."""

    file: Path = flag(
        MISSING, Flag(help="JSON file: a receipt, or an answer that has one; -: stdin.", is_argument=True)
    )
    model: str | None = flag(
        None,
        Flag(
            help="Default: the model or the adapter that the receipt names.",
            heading="Model",
            complete=model_names,
        ),
    )


def verify(flags: VerifyFlags) -> None:
    """Repeat an answer on this machine by its receipt, and compare its tokens and logits.

    The answer to a request with `return_receipt` has a receipt. Exit codes: 0 the answers are equal; 1 they
    are different; 2 the answer cannot be verified, because the receipt was changed or the model is another.
    """
    from genserve.cli.console import print_error
    from genserve.textmodel.receipts import first_difference

    try:
        receipt = _read_receipt(flags.file)
        again = _repeated(receipt, name=flags.model, repository=flags.model_repository)
    except GenserveError as error:
        print_error(error)
        raise SystemExit(_NOT_VERIFIED) from None
    difference = first_difference(receipt, again)
    if difference:
        print(f"different: {difference}")
    else:
        compared = "" if receipt["logits_sha256"] is None else " and their logits"
        print(f"equal: {len(again['token_ids'])} tokens{compared}")
    here = again["made_by"]
    made_by = {name: value for name, value in receipt["made_by"].items() if here.get(name) != value}
    for name, value in made_by.items():
        print(f"  {name}: {value!s:.12} then, {here.get(name, 'none')!s:.12} now")
    if difference:
        raise SystemExit(_DIFFERENT)


def _read_receipt(path: Path) -> Mapping[str, Any]:
    """Return the only receipt in a file; raises InvalidRequest."""
    from genserve.files import read_regular_text
    from genserve.textmodel.receipts import receipts_in

    where = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            text = sys.stdin.read(_MAX_BYTES)
        else:
            text = read_regular_text(path, max_bytes=_MAX_BYTES)
        found = [*receipts_in(json.loads(text))]
    except OSError as error:
        raise InvalidRequest(f"{where} cannot be read: {error.strerror}", field="file") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{where} is not JSON: {error}",
            remedy="of a stream, take the event that has the receipt",
            field="file",
        ) from None
    if len(found) != 1:
        raise InvalidRequest(
            f"{where} has {len(found)} receipts, not one",
            remedy="send the request again with return_receipt, and write its answer to a file",
            field="file",
        )
    return found[0]


def _repeated(
    receipt: Mapping[str, Any], *, name: str | None, repository: Path | None
) -> Mapping[str, Any]:
    """Return the receipt of the same request here.

    Raises:
        GenserveError: see `repeated_request`; there is no such model, or it is not the receipt's.
    """
    from genserve.cli.opened_models import started
    from genserve.repository.repository import Repository
    from genserve.store import default_repository
    from genserve.textmodel.receipts import repeated_request

    request = repeated_request(receipt)
    name = name or request.adapter or str(request.model)
    models = Repository([default_repository() if repository is None else repository])
    with started(models, name) as model:
        _require_same(receipt, model)
        return model.repeat(request)


def _require_same(receipt: Mapping[str, Any], model: TextModel) -> None:
    """Raise RepositoryError if the model is not the one that the receipt describes."""
    from genserve.textmodel.receipts import described

    then, now = described(receipt), described(model.facts())
    other = [name for name in now if then.get(name) != now[name]]
    if other:
        raise RepositoryError(
            f"the receipt is of another model than {model.name!r} here: of {', '.join(sorted(other))}",
            remedy="name the repository that has the files with which the receipt was made",
        )
