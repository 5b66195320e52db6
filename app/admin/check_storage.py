"""`python -m app.admin.check_storage`: whether the artifact store can be used, or why not."""

from app.settings import read_settings
from app.storage import StorageUnavailable, open_storage


def main() -> None:
    """Ask it.

    Raises:
        SystemExit: It cannot be used; with a sentence.
    """
    try:
        open_storage(read_settings().storage, links=False).check()
    except StorageUnavailable as error:
        raise SystemExit(f"the artifact store cannot be used (DRESSAGE_STORAGE): {error}") from None


if __name__ == "__main__":
    main()
