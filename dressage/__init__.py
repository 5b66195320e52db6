"""What users install and import: the contract, authoring, client, command line, sandbox."""
