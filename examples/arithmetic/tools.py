import ast
import operator

from dressage.authoring import function_tool

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@function_tool
def calculate(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: The expression.
    """
    if len(expression) > 60:
        raise ValueError("the expression is too long")
    return str(evaluate(ast.parse(expression, mode="eval").body))


def evaluate(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    raise ValueError("only whole numbers, +, - and * are understood")
