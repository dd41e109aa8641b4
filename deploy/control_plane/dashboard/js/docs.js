// The page at /docs: Swagger UI over this server's own OpenAPI document, with the token that the dashboard has.

import { read, refused, token } from "./data/api.js";
import { byId, setText } from "./elements/dom.js";
import { askForToken } from "./data/token.js";

function show() {
  const chosen = document.documentElement.dataset.theme;
  document.documentElement.classList.toggle("dark-mode", chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  SwaggerUIBundle({
    url: new URL("openapi.json", location.href).href,
    domNode: byId("routes"),
    deepLinking: true,
    filter: true,
    validatorUrl: null,
    displayRequestDuration: true,
    requestInterceptor(request) {
      if (token.get()) request.headers.Authorization = `Bearer ${token.get()}`;
      return request;
    },
    onComplete: () => byId("intro").remove(),
  });
}

async function begin() {
  try {
    await read("openapi.json");
  } catch (error) {
    refused(error);
    if (error.status === 401) return askForToken(begin);
    return setText(byId("intro"), error.message);
  }
  show();
}

begin();
