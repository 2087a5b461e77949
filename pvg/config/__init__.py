"""The configuration: sections, rules between them, and the validated experiment."""
