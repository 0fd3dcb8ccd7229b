"""Retries of operations on a store at a URL, until success, a permanent error or a time limit.

An operation that fails is retried after a growing, random pause. One that stalls (it neither returns nor reports
progress) is abandoned in its daemon thread and retried. Errors that no retry fixes (no credentials, no permission, no
such bucket, no driver) are raised at once with a sentence. The time limit counts from the last byte beyond all earlier
progress.
"""

import errno
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from phalanx.core.errors import ConfigError, StorageError
from phalanx.core.run_paths import redact_url

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
_CREDENTIAL_ERRORS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "SSOError",
    "SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError", "LoginRefreshRequired",
    "DefaultCredentialsError", "RefreshError", "ClientAuthenticationError", "AuthenticationException",
    "GatedRepoError", "LocalTokenNotFoundError",
})  # fmt: skip
_CREDENTIAL_CODES = frozenset({
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired",
    "AuthorizationHeaderMalformed", "InvalidSecurity", "NotSignedUp",
})  # fmt: skip
_NOT_RETRYABLE = (
    ImportError, TypeError, ValueError, IsADirectoryError, NotADirectoryError, FileExistsError
)  # fmt: skip
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG)

T = TypeVar("T")


class _Abandoned(Exception):
    """Raised inside an abandoned operation."""


class RetryAttempt:
    """One try of an operation: it reports progress, and can check whether it was abandoned."""

    def __init__(self) -> None:
        self.position = 0
        self.progressed_at = time.monotonic()
        self.abandoned = False

    def report_progress(self, position: int) -> None:
        """Report that `position` bytes are done."""
        if self.abandoned:
            raise _Abandoned
        self.position, self.progressed_at = position, time.monotonic()


def call_with_retry(
    what: str,
    url: str,
    action: Callable[[RetryAttempt], T],
    timeout_s: float,
    renew: Callable[[str], None] | None = None,
) -> T:
    """Call `action`, and retry it until it succeeds, fails permanently, or makes no progress for `timeout_s`.

    Args:
        what: the operation, for errors, such as "read".
        action: called in a daemon thread, once for each try; it calls `RetryAttempt.report_progress` if it may take
            long.
        renew: called before each further try.

    Raises FileNotFoundError for a missing file, ConfigError for what a user has to fix, else StorageError.
    """
    deadline, pause, farthest, tries = time.monotonic() + timeout_s, FIRST_PAUSE_S, 0, 0
    while True:
        attempt = RetryAttempt()
        tries += 1
        try:
            return _call_with_stall_limit(attempt, action, timeout_s / 3)
        except Exception as caught:
            final = _find_fatal(caught, what, url)
            if final is not None:
                raise final from caught
            error = caught
        if attempt.position > farthest:
            farthest, pause, deadline = attempt.position, FIRST_PAUSE_S, attempt.progressed_at + timeout_s
        wait = pause * random.uniform(0.5, 1.0)
        if time.monotonic() + wait >= deadline:
            raise StorageError(
                f"{redact_url(url)} could not be {what} for {timeout_s:g} s in {tries} tries "
                f"({describe_error(error, url)}); check the store and the network, or raise "
                "resilience.storage_timeout_s"
            ) from error
        time.sleep(wait)
        pause = min(2 * pause, LONGEST_PAUSE_S)
        if renew is not None:
            renew(url)


def _call_with_stall_limit(attempt: RetryAttempt, action: Callable[[RetryAttempt], T], stall_s: float) -> T:
    """Run `action(attempt)` in a thread that is abandoned if there is no progress for `stall_s`."""
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action(attempt))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work, name="storage", daemon=True)
    thread.start()
    try:
        while not done.wait(max(0.001, attempt.progressed_at + stall_s - time.monotonic())):
            if time.monotonic() >= attempt.progressed_at + stall_s:
                raise TimeoutError(f"nothing moved for {stall_s:g} s")
    finally:
        attempt.abandoned = True
    if errors:
        raise errors[0]
    return results[0]


def _find_fatal(error: Exception, what: str, url: str) -> Exception | None:
    """The error to raise at once if a retry would not help, or None."""
    if isinstance(error, ConfigError):
        return error
    code = _store_code(error)
    name = type(error).__name__
    if name in _CREDENTIAL_ERRORS or code in _CREDENTIAL_CODES:
        return ConfigError(
            f"{redact_url(url)} cannot be {what}: the store's credentials are missing or rejected ({code or name}); "
            "set its driver's credentials in the environment or in its configuration file (for s3, "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"
        )
    if code in ("NoSuchBucket", "InvalidBucketName") or "bucket does not exist" in str(error):
        return ConfigError(
            f"{redact_url(url)} cannot be {what}: its bucket does not exist; create it or correct the URL"
        )
    if isinstance(error, PermissionError):
        return ConfigError(
            f"{redact_url(url)} cannot be {what}: access is denied ({describe_error(error, url)}); grant these "
            "credentials access, or use others"
        )
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "the file does not exist", redact_url(url))
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return StorageError(
            f"{redact_url(url)} cannot be {what} ({error.strerror}); free space there or use another URL"
        )
    if isinstance(error, _NOT_RETRYABLE) or name == "ParamValidationError":  # raised by S3's client as by a ValueError
        return ConfigError(
            f"{redact_url(url)} cannot be {what} ({describe_error(error, url)}); correct the URL or use another"
        )
    return None


def _store_code(error: BaseException) -> str | None:
    """Error code of an S3 server; s3fs keeps the answer as the cause."""
    for one in (error, error.__cause__):
        answer = getattr(one, "response", None)
        if isinstance(answer, dict) and isinstance(answer.get("Error"), dict):
            return str(answer["Error"].get("Code"))
    return None


def describe_error(error: BaseException, url: str) -> str:
    """Describe an error in a few words, without secrets of the URL."""
    text = " ".join(str(error).split()).replace(url, redact_url(url))
    secret = urlsplit(url).password
    if secret:
        text = text.replace(secret, "...")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
