"use strict";
// Draws the page's figures when they come near the screen, and again when a control, the theme or the width changes.

const NARROW = 640;
const kept = JSON.parse(document.getElementById("kept").textContent);
const drawn = new Map();  // figure element -> what it shows

function colors(text) {
  if (document.documentElement.dataset.theme === "light") return text;
  return text.replace(/#[0-9a-f]{6}\b/g, color => kept.repainted[color] ?? color);
}

class Drawing {
  constructor(element) {
    this.element = element;
    this.plot = element.querySelector(".plot");
    this.slider = element.querySelector("input[type=range]");
    this.selects = [...element.querySelectorAll("select")];
    this.text = element.querySelector("script").textContent;
    this.repaint();
    this.listen();
    this.size();
  }

  repaint() {
    Object.assign(this, JSON.parse(colors(this.text)));
  }

  get variant() {
    return this.variants[this.selects.map(select => select.value).join(",")];
  }

  get step() {
    return this.variant.steps[this.slider ? Number(this.slider.value) : this.variant.start];
  }

  listen() {
    for (const select of this.selects) select.addEventListener("change", () => this.choose());
    if (!this.slider) return;
    this.slider.addEventListener("input", () => this.draw());
    this.button = this.element.querySelector(".play");
    this.button.addEventListener("click", () => (this.timer ? this.pause() : this.play()));
  }

  choose() {
    if (this.slider) {
      const last = this.variant.steps.length - 1;
      // What was at its end stays there, whatever the number of steps.
      const value = this.slider.value === this.slider.max ? last : Math.min(Number(this.slider.value), last);
      this.slider.max = last;
      this.slider.value = value;
    }
    this.draw();
  }

  play() {
    if (this.slider.value === this.slider.max) this.slider.value = -1;
    this.timer = setInterval(() => {
      this.slider.value = Number(this.slider.value) + 1;
      this.draw();
      if (this.slider.value === this.slider.max) this.pause();
    }, 700);
    this.press(true);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = undefined;
    this.press(false);
  }

  press(on) {
    this.button.setAttribute("aria-pressed", String(on));
    this.button.textContent = on ? kept.pause : kept.play;
  }

  layout() {
    const width = Math.max(this.element.querySelector(".scroll").clientWidth, this.least);
    const layout = structuredClone({...this.variant.layout, ...this.step.layout});
    const panels = layout.annotations?.some(note => note.yref === "paper") ?? false;
    const lines = Math.max(1, ...(layout.annotations ?? []).map(note => (note.text ?? "").split("<br>").length));
    const legend = this.step.traces.filter(i => this.traces[i].showlegend !== false && this.traces[i].name).length > 1
      && layout.showlegend !== false;
    const margin = {l: 60, r: 16, t: panels ? 22 + 20 * lines : 16, b: 56 + (legend ? 34 : 0)};
    const before = layout.margin;
    Object.assign(layout, {
      autosize: false, margin,
      height: layout.height - before.t - before.b + margin.t + margin.b,
      width: layout.width ? Math.min(width, Math.max(layout.width, this.least)) : width,
      legend: {...layout.legend, orientation: "h", x: 0, xanchor: "left", y: 0, yanchor: "bottom", yref: "container"},
      dragmode: false,
    });
    return width < NARROW && !this.least ? stacked(layout) : layout;
  }

  size() {
    this.plot.style.height = `${this.layout().height}px`;
    if (this.least) this.plot.style.minWidth = `${this.least}px`;
  }

  draw() {
    const {step} = this;
    const [title, told] = step.title;
    this.element.querySelector("h3").lastChild.textContent = title;
    this.element.querySelector(".told").innerHTML = told;
    if (this.slider) {
      this.slider.setAttribute("aria-valuetext", step.name);
      this.element.querySelector("output").textContent = step.name;
    }
    const layout = this.layout();
    this.plot.style.height = `${layout.height}px`;
    const traces = step.traces.map(i => structuredClone(this.traces[i]));
    // Many numbers side by side have no room there; a touch still tells each.
    if (layout.width < NARROW) for (const trace of traces) if (columns(trace.z) > 12) delete trace.texttemplate;
    const config = {displayModeBar: false, scrollZoom: false, responsive: false};
    this.drawing = Plotly.react(this.plot, traces, layout, config);
    const scroll = this.plot.parentElement;
    scroll.classList.toggle("wide", scroll.scrollWidth > scroll.clientWidth);
    this.seen = true;
  }
}

// On a phone, panels that lie beside each other go under each other; those without labels stay two in a row.
function stacked(layout) {
  layout.margin = {...layout.margin, l: 44, r: 8};
  const panels = Object.keys(layout).filter(key => key.startsWith("xaxis")).map(key => panel(layout, key));
  if (!panels.some(({wide}) => wide[1] - wide[0] < 0.9)) {
    // A square needs no more height than it has width.
    if (panels[0]?.y.scaleanchor) layout.height = Math.min(layout.height, layout.width + 90);
    return layout;
  }
  const room = layout.height - layout.margin.t - layout.margin.b;
  const diagrams = layout.meta === "tall";  // of boxes with text, which keep their height
  panels.sort((a, b) => b.high[1] - a.high[1] || a.wide[0] - b.wide[0]);
  const rows = [];
  for (const one of panels) {
    const before = rows.at(-1);
    if (one.bare && !diagrams && before?.length === 1 && before[0].bare) before.push(one);
    else rows.push([one]);
  }
  const tall = row => diagrams ? room : Math.max(...row.map(one => one.bare
    ? 150 : Math.min(320, Math.max(190, room * (one.high[1] - one.high[0])))));
  const above = row => 12 + 19 * Math.max(0, ...row.map(one => one.lines));
  const below = row => (row[0].bare ? 6 : row[0].x.title?.text ? 70 : 34);
  const whole = rows.reduce((sum, row) => sum + above(row) + tall(row) + below(row), 0);
  let top = whole;
  for (const row of rows) {
    top -= above(row);
    const high = [(top - tall(row)) / whole, top / whole];
    row.forEach((one, i) => {
      one.x.domain = row[0].bare && !diagrams ? [i * 0.52, i * 0.52 + 0.48] : [0, 1];
      one.y.domain = high;
      if (one.title) Object.assign(one.title, {x: (one.x.domain[0] + one.x.domain[1]) / 2, y: high[1]});
    });
    top -= tall(row) + below(row);
  }
  Object.assign(layout.margin, {t: 8, b: layout.margin.b - 40});
  layout.height = whole + layout.margin.t + layout.margin.b;
  return layout;
}

// Of a heatmap's numbers, as lists or as plotly packs them.
function columns(z) {
  return z?.shape ? Number(z.shape.split(",")[1]) : z?.[0]?.length ?? 0;
}

function panel(layout, key) {
  const x = layout[key], y = layout["yaxis" + key.slice(5)];
  const wide = x.domain ?? [0, 1], high = y.domain ?? [0, 1];
  const title = (layout.annotations ?? []).find(note => note.xref === "paper" && note.yref === "paper"
    && Math.abs(note.x - (wide[0] + wide[1]) / 2) < 1e-6 && Math.abs(note.y - high[1]) < 1e-6);
  const bare = x.visible === false;
  Object.assign(x, {tickangle: 0, tickfont: {...x.tickfont, size: 10}});
  if (title) {
    title.text = wrapped(title.text, bare ? 24 : 38);
    title.font = {...title.font, size: 13};
  }
  return {x, y, wide, high, title, bare, lines: title ? title.text.split("<br>").length : 0};
}

function wrapped(text, width) {
  return text.split("<br>").map(line => {
    const lines = [""];
    for (const word of line.split(" ")) {
      if (lines.at(-1) && (lines.at(-1) + word).replace(/<[^>]*>/g, "").length > width) lines.push("");
      lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
    }
    return lines.join("<br>");
  }).join("<br>");
}

const near = new IntersectionObserver(entries => {
  for (const {isIntersecting, target} of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    drawn.get(target).draw();
  }
}, {rootMargin: "600px"});

for (const element of document.querySelectorAll("figure")) {
  drawn.set(element, new Drawing(element));
  near.observe(element);
}

function again() {
  for (const drawing of drawn.values()) drawing.seen ? drawing.draw() : drawing.size();
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement.dataset;
  root.theme = root.theme === "light" ? "dark" : "light";
  for (const drawing of drawn.values()) drawing.repaint();
  again();
});

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;  // a phone's address bar came or went
  width = innerWidth;
  again();
});

// A link to a question opens it.
function open() {
  const asked = document.getElementById(location.hash.slice(1));
  if (asked?.tagName === "DETAILS") asked.open = true;
}
addEventListener("hashchange", open);
open();
