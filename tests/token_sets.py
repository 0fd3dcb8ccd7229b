"""Token files that tests and benchmarks write document by document."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.record_files import MASK_COLUMN, TOKEN_COLUMN, RecordFileWriter, token_dtype
from phalanx.data.wordpiece import SpecialTokens


class TokenWriter:
    """Writes a token file: see RecordFileWriter. It has a mask if its first documents have one."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_id: int, key: str, specials: SpecialTokens | None = None
    ) -> None:
        assert 0 <= eos_id < vocab_size, f"EOS {eos_id} with a vocabulary of {vocab_size}"
        self._eos_id = eos_id
        facts = {"vocab_size": vocab_size, "eos_id": eos_id, "key": key}
        facts |= {} if specials is None else {"specials": specials.to_json()}
        self._writer = RecordFileWriter(folder, {TOKEN_COLUMN: token_dtype(vocab_size).str}, facts)
        self.finish = self._writer.finish

    def append(self, document: NDArray[Any]) -> None:
        """Add one document (ids of shape (n,), without EOS) and its EOS."""
        tokens = np.append(document, self._eos_id)
        self.extend(tokens, np.array([len(tokens)], np.int64))

    def extend(self, tokens: NDArray[Any], lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None = None) -> None:
        """Add documents that lie behind one another in `tokens`, each ending with EOS; `lengths` count it.

        `mask` says for each token whether it is learnt; a set has it for all of its documents or for none.
        """
        self._writer.extend(
            {TOKEN_COLUMN: (tokens, lengths)} | ({} if mask is None else {MASK_COLUMN: (mask, lengths)})
        )
