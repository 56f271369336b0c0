// What the page does beyond showing: light or dark, values under the pointer, arms hidden and shown.
"use strict";
(() => {
  const root = document.documentElement;
  const keep = (value) => { try { localStorage.setItem("lockstep-theme", value); } catch { /* from disk, some browsers keep nothing */ } };
  try { const kept = localStorage.getItem("lockstep-theme"); if (kept) root.dataset.theme = kept; } catch { /* the same */ }
  document.getElementById("theme").onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    keep(root.dataset.theme);
  };

  const hidden = new Set();  // colours of the arms that are hidden
  const colour_of = (element) => {
    const found = /(?:^| )(c\d)( dashed)?/.exec(element.getAttribute("class") || "");
    return found && found[0].trim();
  };
  for (const button of document.querySelectorAll(".legend button")) {
    const colour = colour_of(button.querySelector("circle"));
    button.onclick = () => {
      const hide = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!hide));
      if (hide) hidden.add(colour); else hidden.delete(colour);
      for (const shape of document.querySelectorAll(".plot .line, .plot .band, .plot .dot")) {
        if (colour_of(shape) === colour) shape.classList.toggle("off", hide);
      }
    };
  }

  const tip = document.getElementById("tip");
  const text = (value) => {
    const span = document.createElement("span");
    span.textContent = value;
    return span.innerHTML;
  };
  const digits = (value) => value === 0 ? "0" : Math.abs(value) < 1e-4 ? value.toExponential(2) : String(+value.toPrecision(4));
  const make = (svg, name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    svg.append(element);
    return element;
  };
  const show = (event, html) => {
    tip.innerHTML = html;
    tip.hidden = false;
    const right = event.clientX + 18 + tip.offsetWidth > innerWidth - 8;
    tip.style.left = Math.max(8, right ? event.clientX - 18 - tip.offsetWidth : event.clientX + 18) + "px";
    tip.style.top = Math.min(innerHeight - tip.offsetHeight - 8, Math.max(8, event.clientY - 20)) + "px";
  };

  // The point of a line that is nearest to a step; points ascend.
  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
  };

  function over_lines(svg, data, marks) {
    const [left, right, first, last] = data.x, [bottom, top, low, high] = data.y;
    const x_of = (step) => left + (right - left) * (step - first) / (last - first);
    const y_of = (value) => bottom + (top - bottom) * (data.log
      ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low));
    const show_value = (value) => data.percent ? digits(100 * value) + " %" : digits(value);
    return (x, y, event) => {
      const lines = data.lines.filter((line) => line.points.length && !hidden.has(line.colour));
      if (!lines.length) return;
      const asked = first + (last - first) * Math.min(1, Math.max(0, (x - left) / (right - left)));
      const step = nearest(lines.map((line) => nearest(line.points, asked)).sort((a, b) => a[0] - b[0]), asked)[0];
      make(marks, "path", {class: "cross", d: `M${x_of(step)} ${top}V${bottom}`});
      let rows = "";
      for (const line of lines) {
        const point = nearest(line.points, step);
        if (point[0] !== step) continue;
        make(marks, "circle", {class: "mark " + line.colour, cx: x_of(step), cy: y_of(point[1]), r: 4});
        const range = point.length > 2 ? `<td><small>${show_value(point[2])} – ${show_value(point[3])}</small></td>` : "";
        rows += `<tr><td><svg class="swatch" viewBox="0 0 10 10"><circle class="${line.colour}" cx="5" cy="5" r="4.5"/></svg>` +
          `${text(line.name)}</td><td>${show_value(point[1])}</td>${range}</tr>`;
      }
      show(event, `<small>step ${digits(step)}</small><table>${rows}</table>`);
    };
  }

  function over_heat(svg, data, marks) {
    const [left, top, width, height] = data.box, columns = data.steps.length;
    const layers = data.values.length / columns;
    return (x, y, event) => {
      const column = Math.floor((x - left) / width * columns), layer = Math.floor((y - top) / height * layers);
      if (column < 0 || column >= columns || layer < 0 || layer >= layers) { tip.hidden = true; return; }
      make(marks, "rect", {class: "cell", x: left + width * column / columns, y: top + height * layer / layers,
        width: width / columns, height: height / layers});
      const value = data.values[layer * columns + column];
      show(event, `<small>step ${digits(data.steps[column])}, layer ${layer}</small>` +
        (value === null ? "not measured" : digits(100 * value) + " %"));
    };
  }

  for (const plot of document.querySelectorAll(".plot")) {
    const script = plot.querySelector("script");
    if (!script) continue;
    const svg = plot.querySelector("svg"), data = JSON.parse(script.textContent);
    const marks = make(svg, "g", {});
    const over = (data.kind === "lines" ? over_lines : over_heat)(svg, data, marks);
    const move = (event) => {
      marks.replaceChildren();
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      over((event.clientX - box.left) * scale, (event.clientY - box.top) * scale, event);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => { marks.replaceChildren(); tip.hidden = true; });
  }
})();
