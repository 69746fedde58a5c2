export function ModelPage() {
  return <div class="head"><h1>Model</h1></div>;
}
