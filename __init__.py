"""Twinpool: disaggregated LLM serving from separately sized PROMPT and COMPLETION pools."""

__version__ = "0.1.0"
