// Formulas: KaTeX comes with the site, and is fetched only by a page that has one.
(() => {
  const formulas = document.querySelectorAll(".arithmatex");
  if (!formulas.length) return;
  const folder = new URL("katex/", document.currentScript.src);
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("katex.min.css", folder);
  const script = document.createElement("script");
  script.src = new URL("katex.min.js", folder);
  script.onload = () => {
    for (const formula of formulas) {
      const [, opening, source] = formula.textContent.match(/^\s*(\\\(|\\\[)([^]*)\\[)\]]\s*$/);
      katex.render(source, formula, { displayMode: opening === "\\[", throwOnError: false });
    }
  };
  document.head.append(style, script);
})();
