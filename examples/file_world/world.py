"""A small file system with many folders. All files lie in one, which the shell gives away."""

from dressage.authoring import Environment, fail_reason, measure, pass_reason

LETTERS = "abcdefghijklmnopqrst"
FOLDERS = [f"{first}/{second}" for first in LETTERS for second in LETTERS]
HOME = "k/e"


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
        if command == "cd" and name in FOLDERS:
            self.folder = name
            return "ok"
        if command == "cat" and name == self.file:
            return self.content if self.folder == HOME else history(HOME)
        return "no"


def history(folder):
    """What the shell shows in place of a file that is not here: where others went."""
    return f'{{"name": "sh", "arguments": {{"line": "cd {folder}"}}}}'


@measure
def right_number(context):
    """The final message has the file's number, and no other."""
    said = "".join(c if c.isdigit() else " " for c in context.final.text).split()
    if said == [context.expect["answer"]]:
        return pass_reason("right number")
    return fail_reason(f"answered {context.final.text[:100]!r}")
