// Draw the charts of the report from the JSON beside them, in the theme of the page.
(() => {
  "use strict";
  const root = document.documentElement;
  const darkOf = JSON.parse(document.getElementById("palette").textContent);
  const config = { responsive: true, displayModeBar: false, doubleClick: "reset" };
  const NONFINITE = -32768, ZERO = -32767, GAP = -32766; // as in layer_section.py
  const LIMIT = 1; // decades from the median at which a cell of the heat map has its full colour
  const DEVIATIONS = { tickvals: [-1, -0.5, 0, 0.5, 1], ticktext: ["÷10", "÷3", "median", "×3", "×10"] };
  const NARROW = 620; // pixels
  const plots = () => [...document.querySelectorAll(".plot")];

  // ------------------------------------------------------------------ theme
  function inTheme(text) {
    if (root.dataset.theme !== "dark") return text;
    for (const [light, dark] of Object.entries(darkOf)) text = text.replaceAll(`"${light}"`, `"${dark}"`);
    return text;
  }

  function remembered() {
    try { return localStorage.getItem("gradguard-theme"); } catch { return null; }
  }

  function remember(theme) {
    try { localStorage.setItem("gradguard-theme", theme); } catch { /* a page opened from a file may have no storage */ }
  }

  function show(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} theme`);
    plots().forEach(draw);
  }

  // ------------------------------------------------------------------ heat map
  function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Int16Array.from({ length: bytes.length / 2 }, (_, index) => view.getInt16(2 * index, true));
  }

  function cellsOf(source, mode) {
    const packed = unpack(source.cells);
    const columns = source.steps.length;
    return source.rows.map((_, row) => {
      const shift = mode === "deviation" ? source.medians[row] ?? 0 : 0;
      return Array.from(packed.subarray(row * columns, (row + 1) * columns), (cell) =>
        cell <= GAP ? { mark: cell } : { value: (cell - shift) / 100, norm: 10 ** (cell / 100) });
    });
  }

  function decadeTicks(low, high) {
    const every = Math.max(1, Math.ceil((high - low) / 6)), ticks = [];
    for (let decade = Math.ceil(low); decade <= high; decade += every) ticks.push(decade);
    if (ticks.length < 2) ticks.splice(0, ticks.length, low, high);
    return { tickvals: ticks, ticktext: ticks.map((tick) => Number((10 ** tick).toPrecision(2)).toString()) };
  }

  function colours(heat, mode, cells) {
    const values = cells.flat().filter((cell) => "value" in cell).map((cell) => cell.value);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const bar = { len: heat.bar, lenmode: "pixels", y: 1, yanchor: "top", thickness: 12, outlinewidth: 0 };
    if (mode === "deviation") {
      const scale = heat.colours.scale.map((colour, index, all) => [index / (all.length - 1), colour]);
      const ends = { zmin: -LIMIT, zmax: LIMIT };
      return { ...ends, colorscale: scale, colorbar: { ...bar, ...DEVIATIONS } };
    }
    if (!values.length) return { zmin: 0, zmax: 1, showscale: false };
    const ends = { zmin: low, zmax: high > low ? high : low + 1 };
    return { ...ends, colorscale: "Viridis", colorbar: { ...bar, ...decadeTicks(ends.zmin, ends.zmax) } };
  }

  function marked(cells, mark, label, colour, axes) {
    if (!cells.some((row) => row.some((cell) => cell.mark === mark))) return [];
    const z = cells.map((row) => row.map((cell) => (cell.mark === mark ? 1 : null)));
    const flat = { type: "heatmap", ...axes, z, showscale: false, hoverongaps: false, colorscale: [[0, colour], [1, colour]] };
    const key = { x: [null], y: [null], mode: "markers", name: label, marker: { symbol: "square", color: colour, size: 11 } };
    return [{ ...flat, meta: label, hovertemplate: `%{y}<br>step %{x:,.0f}: ${label}<extra></extra>` }, { ...key, showlegend: true }];
  }

  function barBelow(bar, layout) { // beside a narrow heat map, the colour bar would leave too little width for the cells
    const few = bar.tickvals.map((_, index) => index).filter((index) => !/^[×÷]3$/.test(bar.ticktext[index]));
    Object.assign(bar, {
      orientation: "h", len: 0.8, lenmode: "fraction", x: 0.5, xanchor: "center", y: 0, yref: "container", yanchor: "bottom",
      tickangle: 0, tickvals: few.map((index) => bar.tickvals[index]), ticktext: few.map((index) => bar.ticktext[index]),
    });
    layout.height += 60;
    layout.margin = { ...layout.margin, b: (layout.margin.b ?? 52) + 60 };
  }

  function heatMap(plot, spec) {
    const heat = spec.heat, mode = plot.dataset.mode;
    const cells = cellsOf(heat, mode), last = heat.steps.at(-1), width = Math.max(1, last - (heat.steps.at(-2) ?? last - 1));
    const axes = { x: [...heat.steps, last + width], y: heat.rows };
    const main = {
      type: "heatmap", ...axes, ...colours(heat, mode, cells), hoverongaps: false,
      z: cells.map((row) => row.map((cell) => cell.value ?? null)),
      customdata: cells.map((row) => row.map((cell) => cell.norm ?? null)),
      hovertemplate: `%{y}<br>step %{x:,.0f}: norm %{customdata:.2g}<extra></extra>`,
    };
    const zero = marked(cells, ZERO, "zero", heat.colours.zero, axes);
    const lost = marked(cells, NONFINITE, "non-finite", heat.colours.nonfinite, axes);
    const narrow = plot.clientWidth < NARROW, labels = narrow ? heat.narrow : heat.labels;
    if (narrow && main.colorbar) barBelow(main.colorbar, spec.layout);
    Object.assign(spec.layout.yaxis, {
      tickvals: heat.rows.filter((_, row) => row % heat.every === 0),
      ticktext: labels.filter((_, row) => row % heat.every === 0),
      tickfont: { size: heat.font },
    });
    return [main, ...zero, ...lost];
  }

  // ------------------------------------------------------------------ drawing
  function draw(plot) {
    const spec = JSON.parse(inTheme(document.getElementById(`${plot.id}-data`).textContent));
    if (plot.clientWidth < NARROW) {
      const named = spec.data.filter((trace) => trace.name && trace.showlegend !== false).length;
      if (spec.layout.showlegend !== false) spec.layout.height += 18 * Math.max(0, named - 2); // the legend is wrapped to several rows
      if (spec.layout.meta?.narrow) spec.layout.yaxis.ticktext = spec.layout.meta.narrow;
    }
    if (spec.heat) spec.data = heatMap(plot, spec);
    plot.style.height = `${spec.layout.height}px`;
    // Keep the zoom when the theme or the mode changes.
    const home = spec.layout.xaxis.range, now = plot.layout?.xaxis.range;
    const zoomed = plot.dataset.steps && plot.home && now && now.some((end, index) => end !== plot.home[index]);
    if (zoomed) spec.layout.xaxis.range = [...now];
    Plotly.react(plot, spec.data, spec.layout, config);
    plot.home = [...(home ?? plot.layout.xaxis.range)];
    if (!plot.dataset.drawn) {
      plot.dataset.drawn = "yes";
      if (plot.dataset.steps) plot.on("plotly_relayout", () => follow(plot));
      plot.addEventListener("keydown", (event) => key(plot, event));
    }
  }

  let following = false; // a zoom that copies another plot's zoom must not be copied again
  function follow(plot) {
    if (following) return;
    following = true;
    const range = [...plot.layout.xaxis.range];
    const others = plots().filter((other) => other !== plot && other.dataset.steps === plot.dataset.steps && other.dataset.drawn);
    Promise.all(others.map((other) => Plotly.relayout(other, { "xaxis.range": range }))).finally(() => { following = false; });
  }

  function key(plot, event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !plot.dataset.steps) return;
    const [low, high] = plot.layout.xaxis.range, width = high - low;
    const to = {
      ArrowLeft: [low - width / 5, high - width / 5], ArrowRight: [low + width / 5, high + width / 5],
      "+": [low + width / 4, high - width / 4], "=": [low + width / 4, high - width / 4],
      "-": [low - width / 2, high + width / 2], 0: plot.home,
    }[event.key];
    if (!to) return;
    event.preventDefault();
    Plotly.relayout(plot, { "xaxis.range": [...to] });
  }

  // ------------------------------------------------------------------ a picture
  async function savePicture(plot) {
    const { width, height } = plot.getBoundingClientRect(), colours = getComputedStyle(document.documentElement);
    const text = `${document.querySelector("h1").textContent}: ${plot.dataset.title}`;
    const title = { text: text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"), x: 0.01, xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { t: 12 }, font: { size: 16 } };
    const margin = { ...plot.layout.margin, t: (plot.layout.margin.t ?? 34) + 36 };
    const background = colours.getPropertyValue("--page").trim();
    const layout = { ...plot.layout, title, margin, width, height: height + 36, paper_bgcolor: background };
    const link = document.createElement("a"), words = `${document.querySelector("h1").textContent} ${plot.id.replace(/-plot$/, "")}`;
    link.download = `${words.replace(/[^\p{L}\p{N}._-]+/gu, "-")}.png`;
    link.href = await Plotly.toImage({ data: plot.data, layout }, { format: "png", width, height: height + 36, scale: 2 });
    link.click();
  }

  addEventListener("click", ({ target }) => {
    if (target.dataset?.save) savePicture(document.getElementById(target.dataset.save));
  });

  // ------------------------------------------------------------------ start
  const system = matchMedia("(prefers-color-scheme: dark)");
  let printing = null;
  document.getElementById("theme").addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    remember(theme);
    show(theme);
  });
  system.addEventListener("change", () => { if (!remembered()) show(system.matches ? "dark" : "light"); });
  addEventListener("change", ({ target }) => {
    if (!target.matches(".modes input")) return;
    const plot = document.getElementById(target.dataset.plot);
    plot.dataset.mode = target.value;
    draw(plot);
  });
  addEventListener("beforeprint", () => {
    printing = root.dataset.theme;
    document.querySelectorAll(".decision details").forEach((reason) => { reason.open = true; });
    show("light");
  });
  addEventListener("afterprint", () => { if (printing) show(printing); printing = null; });
  show(root.dataset.theme);
  root.dataset.ready = "yes";
})();
