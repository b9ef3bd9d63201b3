// The page of sliders. Its formulas are those of assisted/lengths/cost_model.py: `check` compares them with that file's values.
(() => {
  const expectedTokens = (a, g) => (a >= 1 ? g + 1 : (1 - a ** (g + 1)) / (1 - a));
  const verifyCost = (g, rows, w) => (1 + w * (rows * (g + 1) - 1)) / (1 + w * (rows - 1));
  const speedup = (a, c, g, v) => expectedTokens(a, g) / (v + c * g);

  // Called by the site check. The page carries lines of a, c, g, rows, w and the Python functions' tokens, cost and speedup.
  window.check = () => {
    const close = (x, y) => Math.abs(x - y) <= 1e-9 * Math.max(1, Math.abs(y));
    return JSON.parse(document.querySelector("script[data-values]").textContent)
      .filter(([a, c, g, rows, w, tokens, verify, times]) => !(close(expectedTokens(a, g), tokens) &&
        close(verifyCost(g, rows, w), verify) && close(speedup(a, c, g, verifyCost(g, rows, w)), times)))
      .map(line => `the script computes other values than Python for ${line}`);
  };

  const root = document.querySelector(".explore");
  const inputs = Object.fromEntries([...root.querySelectorAll("input")].map(input => [input.name, input]));
  const rowsOf = step => 2 ** step; // the slider of the batch counts doublings
  const LONGEST = 12, WIDTH = 400, HEIGHT = 220, LEFT = 44, RIGHT = 8, TOP = 30, BOTTOM = 40;
  const x = g => LEFT + (g / LONGEST) * (WIDTH - LEFT - RIGHT);

  const draw = () => {
    const [a, c, g, w] = ["a", "c", "g", "w"].map(name => Number(inputs[name].value));
    const rows = rowsOf(Number(inputs.b.value));
    const shown = { a: a.toFixed(2), c: c.toFixed(2), g, b: rows, w: w.toFixed(3) };
    for (const [name, value] of Object.entries(shown)) root.querySelector(`output[for="${name}"]`).textContent = value;

    const all = Array.from({ length: LONGEST + 1 }, (_, k) => speedup(a, c, k, verifyCost(k, rows, w)));
    const best = all.indexOf(Math.max(...all));
    const tokens = expectedTokens(a, g), verify = verifyCost(g, rows, w);
    root.querySelector(".sentence").textContent =
      `A round yields ${tokens.toFixed(2)} tokens and takes ${(verify + c * g).toFixed(2)} forward passes: ` +
      `${(c * g).toFixed(2)} to draft, ${verify.toFixed(2)} to verify. The speedup is ${all[g].toFixed(2)}. ` +
      (best ? `The best draft length is ${best}, with ${all[best].toFixed(2)}.` : "Here the best choice is not to draft.");

    const high = Math.max(2, Math.ceil(Math.max(...all)));
    const y = s => HEIGHT - BOTTOM - (s / high) * (HEIGHT - BOTTOM - TOP);
    const lines = Array.from({ length: high + 1 }, (_, s) => s).filter(s => high <= 6 || s % 2 === 0)
      .map(s => `<path d="M${LEFT} ${y(s)}H${WIDTH - RIGHT}" class="${s === 1 ? "even" : "line"}"/>` +
        `<text x="${LEFT - 6}" y="${y(s) + 4}" text-anchor="end">${s}</text>`);
    const names = [0, 2, 4, 6, 8, 10, 12].map(k => `<text x="${x(k)}" y="${HEIGHT - BOTTOM + 17}" text-anchor="middle">${k}</text>`);
    root.querySelector(".curve").innerHTML = lines.join("") + names.join("") +
      `<text x="${LEFT}" y="14"><tspan>Speedup by draft length</tspan></text>` +
      `<text x="${(LEFT + WIDTH) / 2}" y="${HEIGHT - 4}" text-anchor="middle">draft length, tokens</text>` +
      `<text transform="translate(13 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">speedup, times</text>` +
      `<path d="M${all.map((s, k) => `${x(k)} ${y(s)}`).join("L")}" class="speed"/>` +
      `<circle cx="${x(g)}" cy="${y(all[g])}" r="5"/>`;

    const scale = (WIDTH - 2) / Math.max(tokens, verify + c * g);
    const bar = (top, from, to, kind) => `<rect x="${1 + from * scale}" y="${top}" width="${(to - from) * scale}" height="18" class="${kind}"/>`;
    root.querySelector(".bars").innerHTML =
      `<text x="1" y="14"><tspan>Time of ${tokens.toFixed(2)} tokens, in forward passes</tspan></text>` +
      `<text x="1" y="38">without a draft: ${tokens.toFixed(2)}</text>` + bar(44, 0, tokens, "plain") +
      `<text x="1" y="82">with a draft: ${(verify + c * g).toFixed(2)}, <tspan class="draft">to draft</tspan> and <tspan class="target">to verify</tspan></text>` +
      bar(88, 0, c * g, "draft") + bar(88, c * g, c * g + verify, "target");
  };

  for (const input of Object.values(inputs)) input.addEventListener("input", draw);
  for (const button of document.querySelectorAll("button[data-try]"))
    button.addEventListener("click", () => {
      for (const [name, value] of Object.entries(JSON.parse(button.dataset.try))) inputs[name].value = value;
      draw();
      root.scrollIntoView({ block: "nearest" });
    });
  draw();
})();
