"""Programs that test a whole system for minutes or hours: chaos, hostile code, soak."""
