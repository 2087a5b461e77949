"""`python -m pvg_cli.documents` writes the schemas, and the table in docs/contracts.md."""

from pvg_cli.documents import PAGE, with_table, write_schemas

write_schemas()
PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
