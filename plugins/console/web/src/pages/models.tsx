export function ModelsPage() {
  return <div class="head"><h1>Models</h1></div>;
}
