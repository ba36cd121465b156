// The page: its head and toolbar, then every view.

// Title, tiles and notes.
function startHead() {
  byId("title").textContent = plan.title;
  byId("subtitle").textContent = plan.subtitle;
  fill(byId("facts"), plan.facts.map(([label, figure, remark]) => make("div", {}, [
    make("dt", {}, [label]), make("dd", { class: "fact" }, [figure]), make("dd", {}, [remark]),
  ])));
  fill(byId("notes"), plan.notes.map((note) => make("li", {}, [note])));
}

// The stage selector: all, then each stage.
function startSelector() {
  const box = byId("stage");
  fill(box, [make("option", { value: "" }, ["all stages"]), ...plan.stages.map((stage) =>
    make("option", { value: String(stage.index) }, [`stage ${stage.index}, ranks ${stage.ranks}`]))]);
  box.addEventListener("change", () => select({ stage: box.value === "" ? null : Number(box.value) }));
  watch(() => { box.value = selection.stage === null ? "" : String(selection.stage); });
}

// The search box; it waits for a pause in typing.
function startSearch() {
  const box = byId("search");
  let timer = 0;
  box.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => select({ query: box.value }), 120);
  });
}

// Light or dark: as the system has it, until the button says otherwise.
function startTheme() {
  const button = byId("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const show = () => {
    const dark = chosen === null ? system.matches : chosen === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to ${dark ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    show();
    drawTimeline();
  });
  system.addEventListener("change", () => {
    show();
    drawTimeline();
  });
  show();
}

// Keys of the whole page: / goes to the search box, Escape shows everything again.
function startKeys() {
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT)$/.test(event.target.tagName);
    if (event.key === "/" && !typing) {
      event.preventDefault();
      byId("search").focus();
    } else if (event.key === "Escape") {
      hideTip();
      byId("search").value = "";
      select({ stage: null, query: "" });
    }
  });
}

startTheme();
startHead();
startSelector();
startSearch();
startKeys();
startTimeline();
startMemory();
startModel();
startCluster();
startAlternatives();
startTables();
