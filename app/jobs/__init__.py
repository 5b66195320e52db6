"""Jobs: endpoints → service → repository; `lifecycle` alone writes a status."""
