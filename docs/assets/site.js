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

// A moving picture begins once half of it is seen. Its own style keeps it still for those who asked for less motion.
for (const picture of document.querySelectorAll(".moving")) {
  picture.classList.add("waits");
  new IntersectionObserver(([{ isIntersecting }], observer) => {
    if (!isIntersecting) return;
    picture.classList.remove("waits");
    observer.disconnect();
  }, { threshold: .5 }).observe(picture);
}
