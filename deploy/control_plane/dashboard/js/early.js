// Before the first paint, so that a chosen theme does not flash. Without a choice the system's is used.
(() => {
  const chosen = localStorage.getItem("tidemill-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
