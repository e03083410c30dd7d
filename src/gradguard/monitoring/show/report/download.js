// Saves a chart as a picture, or what it draws as a table.
(() => {
  "use strict";

  const plain = (text) => new DOMParser().parseFromString(text, "text/html").body.textContent;

  function save(plot, ending, address) {
    const link = document.createElement("a");
    const words = `${document.querySelector("h1").textContent} ${plot.id.replace(/-plot$/, "")}`;
    link.download = `${words.replace(/[^\p{L}\p{N}._-]+/gu, "-")}.${ending}`;
    link.href = address;
    link.click();
  }

  // ------------------------------------------------------------------ a picture
  async function savePicture(plot) {
    const { width, height } = plot.getBoundingClientRect(), colours = getComputedStyle(document.documentElement);
    const text = `${document.querySelector("h1").textContent}: ${plot.dataset.title}`;
    const title = { text: text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"), x: 0.01, xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { t: 12 }, font: { size: 16 } };
    const margin = { ...plot.layout.margin, t: (plot.layout.margin.t ?? 34) + 36 };
    const background = colours.getPropertyValue("--page").trim();
    const layout = { ...plot.layout, title, margin, width, height: height + 36, paper_bgcolor: background };
    save(plot, "png", await Plotly.toImage({ data: plot.data, layout }, { format: "png", width, height: height + 36, scale: 2 }));
  }

  // ------------------------------------------------------------------ a table
  function cell(value) {
    let text = value === null || value === undefined ? "" : plain(String(value));
    if (/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`; // no formula of a spreadsheet
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  const digits = (value) => (value === null || value === undefined ? null : Number(value.toPrecision(4)));

  function table(plot) {
    const [first] = plot.data, columns = plot.layout.meta?.columns;
    if (first?.type === "heatmap") // layers: a column for each parameter
      return [["step", ...first.y], ...first.x.slice(0, -1).map((step, column) => [step, ...first.y.map((_, row) => layer(plot, row, column))])];
    const points = (trace) => trace.y.map((y, index) => [trace.customdata[index], trace.name, y]);
    if (columns) return [columns, ...plot.data.flatMap((trace) => trace.meta ?? points(trace))];
    const lines = plot.data.filter((trace) => trace.name && trace.fill !== "toself");
    const rows = lines.flatMap((trace) => trace.x.map((x, index) => [trace.name, x, trace.y[index], ...(trace.customdata?.[index] ?? [])]));
    return [["series", "step", "value", "smallest around it", "largest around it"], ...rows.filter((row) => row[1] !== null)];
  }

  function layer(plot, row, column) {
    const [main, ...marks] = plot.data;
    const mark = marks.find((trace) => trace.type === "heatmap" && trace.z[row][column]);
    if (mark) return mark.meta === "zero" ? 0 : mark.meta;
    const value = main.customdata[row][column];
    return value === null ? null : Number(value.toPrecision(2)); // the page has no more digits of it
  }

  function saveTable(plot) {
    const text = table(plot).map((row) => row.map(cell).join(",")).join("\r\n");
    const address = URL.createObjectURL(new Blob([`${text}\r\n`], { type: "text/csv" }));
    save(plot, "csv", address);
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  }

  addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-save]") : null;
    if (!button) return;
    const plot = document.getElementById(button.dataset.plot);
    (button.dataset.save === "png" ? savePicture : saveTable)(plot);
  });
})();
