"""``kind = "hf"``: a dataset of the Hugging Face hub, or a folder written by ``save_to_disk``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollover.errors import DataError
from rollover.tasks.fingerprint import Fingerprint, fingerprint_of_rows
from rollover.tasks.rows import DatasetRows
from rollover.tasks.sources.base import DatasetSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig(DatasetSettings):
    """Takes prompts from a dataset of the Hugging Face hub, or a folder written by ``save_to_disk``."""

    kind: Literal["hf"] = "hf"
    """``"hf"`` chooses a dataset of the hub or a saved one."""
    split: str | None = None
    """Split of the dataset. Unset: ``train``."""
    subset: str | None = None
    """Configuration name of a dataset of the hub."""

    def look_up(self) -> bool:
        if is_far := not Path(self.path).is_dir():
            HubRows(self.path, self.subset, self.split, is_needed=False)
        return is_far

    def open(self, seed: int) -> DatasetRows:
        return self._not_empty(HubRows(self.path, self.subset, self.split))

    def fingerprint(self) -> Fingerprint:
        return fingerprint_of_rows(self.open(seed=0), self.path)


class HubRows:
    """Reads one split of a hub dataset or of a ``save_to_disk`` folder; unless it ``is_needed``, only asks the hub for
    it."""

    def __init__(self, path: str, subset: str | None, wanted: str | None, *, is_needed: bool = True) -> None:
        import datasets

        split = wanted or "train"
        self._name = f"{path} [{split}]"
        is_one = (Path(path) / "state.json").exists()
        if subset is not None and (is_one or (Path(path) / "dataset_dict.json").exists()):
            raise DataError(f"dataset {path!r} was written by save_to_disk, which keeps no subsets: leave subset out")
        try:
            if (Path(path) / "dataset_dict.json").exists():
                self._data = datasets.load_from_disk(path)[split]
            elif is_one:
                self._data = datasets.load_from_disk(path)
                if wanted not in (None, str(self._data.split or wanted)):
                    raise KeyError(wanted)
            elif not is_needed:
                datasets.load_dataset_builder(path, subset)
            else:
                self._data = datasets.load_dataset(path, subset, split=split)
        except KeyError:
            saved = datasets.load_from_disk(path)
            known = str(saved.split) if is_one else ", ".join(sorted(saved))
            raise DataError(f"dataset {path!r} has no split {split!r}; it has: {known}") from None
        except Exception as error:  # the library raises its own, the hub client's and the network's errors
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"dataset {path!r} (subset {subset!r}, split {split!r}) cannot be loaded: {reason}; check "
                "the name or, without a network, give the path of a folder written by save_to_disk"
            ) from None

    @property
    def num_rows(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self._data[row])

    def where(self, row: int) -> str:
        return f"dataset {self._name}, row {row}"
