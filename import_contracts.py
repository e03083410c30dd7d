"""A contract for the import linter, whose own kinds know other packages by their first name alone."""

import re
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class OnlyImporters(Contract):
    """Only some modules, and what is inside them, import a module of another package."""

    type_name = "only_importers"
    imported: Any = fields.StringField()
    importers: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        """Look at the line of each import of the other package."""
        del verbose
        package, _, rest = self.imported.partition(".")
        spelled = re.compile(rf"\b{re.escape(self.imported)}\b|\bfrom {package} import .*\b{rest}\b")
        lines = [
            f"{one}, line {detail['line_number']}: {detail['line_contents']}"
            for one in sorted(graph.find_modules_that_directly_import(package))
            if not any(one == known or one.startswith(f"{known}.") for known in self.importers)
            for detail in graph.get_import_details(importer=one, imported=package)
            if spelled.search(detail["line_contents"])
        ]
        return ContractCheck(kept=not lines, metadata={"lines": lines})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the lines."""
        for line in check.metadata["lines"]:
            output.print_error(line)
