"""Keys and the audit trail, as the API shows them. Who asks is found out in app.auth."""
