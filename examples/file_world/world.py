"""A small file system in which every kind of file has its folder."""

from dressage.authoring import Environment, fail_reason, measure, pass_reason

FOLDERS = {
    "txt": "notes",
    "log": "journal",
    "png": "pictures",
    "csv": "data",
    "key": "safe",
    "zip": "archive",
}


class FileWorld(Environment):
    """One file, and a shell that remembers where it is."""

    def reset(self, case):
        self.file = case.metadata["file"]
        self.content = case.expect["answer"]
        self.folder = None

    def sh(self, line: str) -> str:
        """Run a line.

        Args:
            line: The line.
        """
        command, _, name = line.partition(" ")
        if command == "cd" and name in FOLDERS.values():
            self.folder = name
            return "ok"
        if command == "cat" and name == self.file:
            home = FOLDERS[name.split(".")[1]]
            return self.content if self.folder == home else hint(home)
        return "no"


def hint(folder):
    """What the shell says about a file that is elsewhere."""
    return f"try cd {folder}"


@measure
def right_number(context):
    """The final message has the file's number, and no other."""
    said = "".join(c if c.isdigit() else " " for c in context.final.text).split()
    if said == [context.expect["answer"]]:
        return pass_reason("right number")
    return fail_reason(f"answered {context.final.text[:100]!r}")
