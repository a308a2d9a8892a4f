"use strict";
(async () => {
  const config = { responsive: true, displayModeBar: false };
  const chosen = {}; // the variant of each figure that has several
  let figures;

  // Plotly and the figures are packed; browsers unpack them since 2023.
  const unpacked = (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const plotly = document.createElement("script");
  plotly.textContent = await unpacked("plotly");
  document.head.append(plotly);

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
    const { data, layout } = painted(figures[id][chosen[id]] ?? figures[id][0], palette());
    return Plotly.react(id, data, layout, config);
  };
  const drawAll = () => Object.keys(figures).forEach(draw);

  const press = (button) => button.parentElement.querySelectorAll("button")
    .forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
  const choose = ({ figures: ids, variant }) => ids.split(" ").forEach((id) => { chosen[id] = Number(variant); });
  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    press(button);
    if (button.dataset.colouring) document.body.dataset.colouring = button.dataset.colouring;
    if (!button.dataset.figures) return;
    choose(button.dataset);
    button.dataset.figures.split(" ").forEach(draw);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  const show = async () => {
    figures = JSON.parse(await unpacked("figures"));
    document.querySelectorAll("button[data-figures]").forEach((button) => {
      const [id] = button.dataset.figures.split(" ");
      if (id in chosen ? chosen[id] === Number(button.dataset.variant) : button.getAttribute("aria-pressed") === "true") {
        press(button);
        choose(button.dataset);
      }
    });
    document.querySelectorAll(`button[data-colouring="${document.body.dataset.colouring}"]`).forEach(press);
    drawAll();
  };
  await show();

  // A live page replaces its content by what the server has now, unless someone reads a text in it. Making the page
  // costs the training machine time: a twentieth at most.
  const refresh = async () => {
    const began = performance.now();
    try {
      const answer = document.querySelector("details[open]") ? null : await fetch(location.href);
      if (answer?.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        document.querySelectorAll(".js-plotly-plot").forEach((figure) => Plotly.purge(figure));
        for (const part of ["main", "#figures"]) document.querySelector(part).replaceWith(page.querySelector(part));
        await show();
      }
    } catch { /* the server is gone; it may come back */ }
    setTimeout(refresh, Math.max(5000, 20 * (performance.now() - began)));
  };
  if (document.body.hasAttribute("data-live")) setTimeout(refresh, 5000);
})();
