import { defineConfig } from "vite";

// Addresses are relative, so that the console works below any path of a reverse proxy.
export default defineConfig({
  base: "./",
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the content security policy allows no inline script
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 300,
  },
});
