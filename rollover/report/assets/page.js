"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const chosen = {};
  const config = { responsive: true, displayModeBar: false };

  // Figures name colours by the page's CSS variables, so that they follow the theme.
  const names = ["page", "surface", "ink", "muted", "line", "grid", "blue", "orange", "green", "violet", "red", "pink",
    "cyan", "yellow", "brown", "soft", "gap", "wash", "band"];
  const palette = () => {
    const style = getComputedStyle(document.documentElement);
    return new Map(names.map((name) => ["--" + name, style.getPropertyValue("--" + name).trim()]));
  };
  const painted = (value, colours) => {
    if (typeof value === "string") return colours.get(value) ?? value;
    if (Array.isArray(value)) return value.map((item) => painted(item, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, colours)]));
  };
  const draw = (id) => {
    const variant = figures[id][chosen[id] ?? 0];
    const { data, layout } = painted(variant, palette());
    return Plotly.react(id, data, layout, config);
  };
  const drawAll = () => Object.keys(figures).forEach(draw);

  document.querySelectorAll("button[data-figures]").forEach((button) => {
    button.addEventListener("click", () => {
      button.parentElement.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      for (const id of button.dataset.figures.split(" ")) {
        chosen[id] = Number(button.dataset.variant);
        draw(id);
      }
    });
    if (button.getAttribute("aria-pressed") === "true") {
      for (const id of button.dataset.figures.split(" ")) chosen[id] = Number(button.dataset.variant);
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
