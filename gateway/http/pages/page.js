"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
paint();
dark.addEventListener("change", paint);
const ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#page",
  deepLinking: true,
  docExpansion: "none",
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  tryItOutEnabled: true,
  validatorUrl: null,
  onComplete: () => {
    for (const tag of ui.specSelectors.specJson().toJS().tags || []) {
      if (tag["x-open"]) ui.layoutActions.show(["operations-tag", tag.name], true);
    }
  },
});
