"""`python -m app.check_storage`: whether the artifact store can be used, or why not."""

from app.settings import read_settings
from app.storage import StorageAway, open_storage


def main() -> None:
    """Ask it.

    Raises:
        SystemExit: It cannot be used; with a sentence.
    """
    try:
        open_storage(read_settings().storage, links=False).check()
    except StorageAway as error:
        raise SystemExit(f"the artifact store cannot be used (DRESSAGE_STORAGE): {error}") from None


if __name__ == "__main__":
    main()
