"""Data sets of the `datasets` library as a source of documents."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

from intarsia.contracts import Document
from intarsia.errors import PluginError, UsageError, did_you_mean
from intarsia_data.records import to_document

from intarsia_huggingface.config import HFDatasetsConfig


class HFDatasetsSource:
    """One split of a data set; a row is a document."""

    def __init__(self, config: HFDatasetsConfig):
        self._config = config
        self._what = f"hf_datasets: {config.path}" + (f" ({config.name})" if config.name else "")
        self._data = self._load()
        self._content = self._data._fingerprint
        names = list(self._data.column_names)
        if config.column not in names:
            raise UsageError(
                f"{self._what}: there is no column {config.column!r}. Columns here: {', '.join(map(repr, names))}. {did_you_mean(config.column, names)}"
            )
        self._data = self._data.select_columns([name for name in dict.fromkeys((config.column, config.trained)) if name in names])

    def _load(self) -> Any:
        """The split, as a table of known length. Errors: PluginError without the library, UsageError for what it cannot load."""
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise PluginError(
                f"{self._what}: the library datasets is needed and cannot be imported: {error}. Install it: pip install 'intarsia-huggingface[datasets]'"
            ) from error
        config, folder = self._config, Path(self._config.path).expanduser()
        saved = any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
        try:
            if saved:
                data = datasets.load_from_disk(str(folder))
            else:
                files = list(config.data_files) or None
                data = datasets.load_dataset(config.path, config.name, split=config.split, data_files=files, revision=config.revision)
        except Exception as error:
            raise UsageError(f"{self._what}: split {config.split!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if isinstance(data, dict):
            if config.split not in data:
                raise UsageError(f"{self._what}: there is no split {config.split!r}. {did_you_mean(config.split, data)}")
            data = data[config.split]
        return data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Document:
        return to_document(self._data[index], self._config.column, f"{self._what}, row {index}", self._config.trained)

    def fingerprint(self) -> str:
        """Over the library's own fingerprint of the table, which follows the files it was made from, and the columns."""
        facts = (self._config.column, self._config.trained, len(self), self._content)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
